"""Keys that stand for others: ``expand`` of a config class says for which, and problems find the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config.problems import KeyPath, key_path, key_text

Table = Mapping[str, Any]


def expanded(cls: type, table: Table) -> tuple[Table, Mapping[str, str]]:
    """A component's table with its shorthands written out, and ``ComponentRef.written``: what was there for its
    keys."""
    expand = getattr(cls, "expand", None)
    if expand is None:
        return table, {}
    made: tuple[Table, Mapping[str, str]] = expand(table)
    return made


def as_written(path: KeyPath, written: Mapping[str, str]) -> KeyPath:
    """The way to what was written, of a value in the expanded table."""
    for length in range(len(path), 0, -1):
        instead = written.get(key_text(path[:length]))
        if instead is not None:
            return (*key_path(instead), *path[length:])
    return path
