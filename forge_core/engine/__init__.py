"""Build a job's model on its mesh, and train it."""
