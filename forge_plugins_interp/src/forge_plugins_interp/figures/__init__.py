"""Pictures of what is found. They need matplotlib, and no display."""
