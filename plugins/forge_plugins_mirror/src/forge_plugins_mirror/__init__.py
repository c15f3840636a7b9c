"""Forge's standard library for mirrors: checkpoints copied to a path or a URL, and fetched from there."""
