"""Layers against recordings of brains."""
