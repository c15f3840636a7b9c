"""Replicas of a run that outlive each other, with torchft."""
