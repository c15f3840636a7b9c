"""Weights of trained models: read into a model, written as a checkpoint, taken into another run."""
