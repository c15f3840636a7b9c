"""Connectors: from features of images to the width of the decoder."""
