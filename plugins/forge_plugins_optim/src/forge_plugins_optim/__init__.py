"""Forge's standard optimizers, learning-rate schedules and losses."""
