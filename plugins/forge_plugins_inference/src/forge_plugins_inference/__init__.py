"""Text from trained models: see the README."""
