"""Typed configuration back to plain TOML data."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time
from enum import Enum
from pathlib import Path
from typing import Any

import attrs

from forge_core.contracts.component_ref import ComponentRef


def plain(value: Any) -> Any:
    """``value`` in types that TOML has: all fields of a table, without ``None``, and components by qualified name.

    Raises:
        TypeError: TOML has no such value.
    """
    if isinstance(value, ComponentRef):
        for key, instead in value.written.items():
            if not instead:  # a string that stands for the table is written as one
                return plain(getattr(value.config, key))
        return {"name": value.qualified_name, **plain(value.config)}
    if attrs.has(type(value)):
        fields = [(field.alias, getattr(value, field.name)) for field in attrs.fields(type(value)) if field.init]
        return {key: plain(item) for key, item in fields if item is not None}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        # sorted, so that equal jobs are equal texts; None is a pass that is switched off
        return {key: False if value[key] is None else plain(value[key]) for key in sorted(value)}
    if isinstance(value, AbstractSet):
        return sorted(map(plain, value))
    if isinstance(value, (list, tuple)) and not any(item is None for item in value):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if value is not None and not isinstance(value, (str, int, float, date, time, Path)):
        raise TypeError(f"{value!r} cannot be written in TOML")
    return str(value) if isinstance(value, Path) else value
