"""Image and video data."""
