"""Sparse autoencoders and transcoders of what sites have."""
