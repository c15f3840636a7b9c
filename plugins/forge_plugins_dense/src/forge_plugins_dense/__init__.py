"""Forge's standard library."""
