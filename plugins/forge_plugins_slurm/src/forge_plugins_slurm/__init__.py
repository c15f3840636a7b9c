"""Forge's standard library for Slurm: submitting, requeueing, and looking after runs."""
