"""Conformance kits of the kinds that this package adds. They need pytest."""
