"""Evaluations of answers about images."""
