"""Image processors: from a picture to tiles of pixels."""
