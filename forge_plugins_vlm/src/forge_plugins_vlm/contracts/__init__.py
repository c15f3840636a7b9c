"""The contracts of the kinds that this package adds."""
