"""Forge's core: finds components by name, puts them together, and runs them. It knows no model and no plugin."""

__version__ = "0.1.0"
