"""Health checks of a run's machines: see the README."""
