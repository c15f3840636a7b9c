"""Patterns of module names, as models write their plans: ``*`` stands for one part of a name between dots."""

from __future__ import annotations


def fits(name: str, pattern: str) -> bool:
    """Return whether ``blocks.*.head`` means ``name``: ``blocks.3.head``, but not ``blocks.3.head.norm``."""
    return name.count(".") == pattern.count(".") and is_within(name, pattern)


def is_within(name: str, pattern: str) -> bool:
    """Return whether ``name`` is of a module that the pattern means, or of one in it."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(w in ("*", part) for part, w in zip(parts, wanted, strict=False))
