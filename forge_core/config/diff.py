"""Differences between two resolved jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs


@attrs.frozen
class Difference:
    """One key that differs."""

    key: str
    """Such as ``callbacks[0].interval``."""
    old: Any
    """``None`` if the key is only in the new job; TOML has no such value."""
    new: Any
    """``None`` if the key is only in the old job."""


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """The keys whose value or type differs, in the order of ``a``, then the keys of ``b`` alone.

    Tables are compared key by key, also those in arrays; other arrays as a whole.

    Args:
        a: the old job, as ``job_table`` gives it.
        b: the new one.
    """
    old, new = dict(leaves(a)), dict(leaves(b))
    keys = dict.fromkeys([*old, *new])
    return [Difference(key, old.get(key), new.get(key)) for key in keys if not _identical(old.get(key), new.get(key))]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table with their keys, such as ``callbacks[0].interval``; arrays as a whole, but for those of
    tables."""
    if isinstance(value, Mapping) and (value or not key):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{key}[{index}]")
    else:
        yield key, value


def _identical(a: Any, b: Any) -> bool:
    """Python holds 1, 1.0 and true for equal; TOML does not."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_identical, a, b))
    return type(a) is type(b) and bool(a == b)
