"""Forge plugin: sound as tokens, 256 levels of the mu-law a moment."""
