"""Checkpoints in the memory of the nodes that train, each with a copy on the next node."""
