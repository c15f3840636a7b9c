"""Passes over a built model: sharding and compilation."""
