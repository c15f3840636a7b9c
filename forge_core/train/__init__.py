"""The model of a job, built, and its training loop."""
