"""Forge plugin: ReLU routing: experts a token as it needs, so many on average."""
