"""Runs as their directories tell of them: which there are, how far they are, and why they have stopped."""
