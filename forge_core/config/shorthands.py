"""Keys that stand for others: ``expand`` of a config class says for which, and problems find the way back."""

from __future__ import annotations

from collections.abc import Mapping

from forge_core.config.problems import KeyPath, key_path, key_text


def as_written(path: KeyPath, written: Mapping[str, str]) -> KeyPath:
    """The way to what was written, of a value in the expanded table."""
    for length in range(len(path), 0, -1):
        if (instead := written.get(key_text(path[:length]))) is not None:
            return (*key_path(instead), *path[length:])
    return path
