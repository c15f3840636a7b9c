"""Keys of evaluations as options of ``forge eval``: ``--tasks a,b`` is ``evaluations.0.tasks=["a", "b"]``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, get_args, get_origin

import attrs

from forge_core.config.builder import config_class
from forge_core.errors import ConfigError, nearest_hint
from forge_core.job import SECTIONS
from forge_core.registry.catalog import Catalog


def with_evaluation_options(
    words: Sequence[str], names: Sequence[str], catalog: Catalog, options: Collection[str]
) -> list[str]:
    """The words of the command line with settings in place of options that are keys of the named evaluations. A key
    is set of each evaluation that has it. Underscores may be hyphens, and entries of an array stand between commas.

    Args:
        options: those of the command, one of which may be misspelt.

    Raises:
        ConfigError: an option is neither a key nor a section, or has no value; or there is no such evaluation.
    """
    types = [_types_of_keys(name, catalog) for name in names]
    known = [*options, *(f"--{key.replace('_', '-')}" for keys in types for key in keys)]
    found: list[str] = []
    remaining = [*words]
    while remaining:
        word = remaining.pop(0)
        option, equals, value = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        having = [(number, keys[key]) for number, keys in enumerate(types) if key in keys]
        if not option.startswith("-") or "." in option or key in SECTIONS:
            found.append(word)  # a setting, or the value of one
            continue
        if not having:
            raise ConfigError(f"{option}: no such option{nearest_hint(option, known)}")
        if not equals:
            value = _value_behind(option, having[0][1], remaining)
        found += [f"evaluations.{number}.{key}={_as_toml(value, kind)}" for number, kind in having]
    return found


def _types_of_keys(name: str, catalog: Catalog) -> Mapping[str, Any]:
    entry = catalog.lookup("evaluation", name)
    config, _ = config_class(entry, catalog.kinds["evaluation"])
    return {str(field.alias): field.type for field in attrs.fields(attrs.resolve_types(config))}


def _value_behind(option: str, kind: Any, remaining: list[str]) -> str:
    """The next word; ``true`` of a key that is a switch, where none is there."""
    is_there = bool(remaining) and not remaining[0].startswith("--")
    if kind is bool and not (is_there and remaining[0] in ("true", "false")):
        return "true"
    if not is_there:
        raise ConfigError(f"{option}: needs a value, as in {option}=…")
    return remaining.pop(0)


def _as_toml(value: str, kind: Any) -> str:
    entries = next(_types_of_entries(kind), None)
    if entries is None or value.startswith("["):
        return value
    is_text = entries is str or get_origin(entries) is Literal
    parts = [part.strip() for part in value.split(",") if part.strip()]
    return f"[{', '.join(json.dumps(part) if is_text else part for part in parts)}]"


def _types_of_entries(kind: Any) -> Iterator[Any]:
    """The type of an array's entries, also of one that may be left out."""
    for one in (kind, *get_args(kind)):
        origin = get_origin(one)
        if isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)):
            yield get_args(one)[0]
