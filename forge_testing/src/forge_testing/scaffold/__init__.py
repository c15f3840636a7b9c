"""Packages to start from.

``<kind>.txt`` holds the files of a package for one kind, ``package.txt`` those of every kind, ``example.txt`` sections
of a run for examples. ``=== path`` begins a file; ``$name`` and the like are filled in by ``package.py``.
"""
