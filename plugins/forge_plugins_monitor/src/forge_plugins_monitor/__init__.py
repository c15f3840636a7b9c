"""Health checks of machines, before a run and during it: see the README."""
