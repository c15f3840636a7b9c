"""Forge's core: finds components by name, puts them together, and runs them. It knows no model and no plugin."""

from forge_core.moved import find_moved_modules

__version__ = "0.1.0"

find_moved_modules()
