"""Looks at every run: do optimizers and models keep to their contracts, and where did a value stop being finite."""
