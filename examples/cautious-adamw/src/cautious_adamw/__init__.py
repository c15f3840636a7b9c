"""Forge plugin: AdamW that leaves out what goes against the gradient."""
