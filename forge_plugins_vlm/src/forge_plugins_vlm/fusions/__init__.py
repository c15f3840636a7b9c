"""Fusions: how a decoder reads images."""
