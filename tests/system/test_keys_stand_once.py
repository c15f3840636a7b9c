"""A sentence about a key does not say the key again: ``label: must be …``, not ``label: label must be …``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import pytest

from forge_core.config.converter import config_class, slot_of, structure
from forge_core.config.problems import InvalidError, Problem, key_text
from forge_core.config.sections import Job
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover

BAD = (-1, 0, 10**12, 1.5, "", "a b", [], [-1], [0, 0], ["a", "a"], {"no key": -1})


def test_the_sentences_about_all_keys_begin_with_something_else():
    catalog = discover()
    tables = {f.name: f.type for f in attrs.fields(attrs.resolve_types(Job, include_extras=True)) if attrs.has(f.type)}
    for kind in catalog.kinds:
        for entry in catalog.components(kind):
            tables[f"{kind} {entry.component.name}"] = config_class(entry, catalog.kinds[kind])[0]

    found = [(name, problem) for name, cls in tables.items() for problem in problems(cls, catalog)]

    assert len(found) > 5_000
    assert [f"{name}: {problem}" for name, problem in found if says_its_key(problem)] == []
    assert [f"{name}: {problem}" for name, problem in found if "This is a bug in" in problem.sentence] == []


@pytest.mark.parametrize("sentence", ["label must be short", "'label' must be short"])
def test_a_validator_may_name_its_field(sentence):
    def refuse(*_: Any) -> None:
        raise ValueError(sentence)

    cls = attrs.make_class("Config", {"label": attrs.field(type=str, validator=refuse)})

    with pytest.raises(InvalidError) as error:
        structure({"label": "long"}, cls, Catalog([]))

    assert str(error.value) == "label: must be short"


def problems(cls: type, catalog: Catalog) -> Iterator[Problem]:
    """Those of tables in which everything is valid but one key."""
    needed = required(cls, catalog)
    for field in attrs.fields(attrs.resolve_types(cls, include_extras=True)):
        for value in BAD if field.init else ():
            try:
                structure({**needed, field.alias: value}, cls, catalog)
            except InvalidError as error:
                yield from error.problems


def says_its_key(problem: Problem) -> bool:
    """Return whether the sentence begins with the key that stands before it anyway."""
    keys = [key_text(problem.path), *(str(key) for key in problem.path[-1:])]
    return any(re.match(rf"'?{re.escape(key)}\b'?", problem.sentence) for key in keys if key)


def required(cls: type, catalog: Catalog) -> dict[str, Any]:
    """A valid table: a value for each key that must be there."""
    fields = attrs.fields(attrs.resolve_types(cls, include_extras=True))
    return {one.alias: a_valid(one.type, catalog) for one in fields if one.init and one.default is attrs.NOTHING}


def a_valid(annotation: Any, catalog: Catalog) -> Any:
    """A value of a type; for a component, the first one, with what it needs."""
    if slot := slot_of(annotation):
        entry = catalog.components(slot.kind)[0]
        return {
            "name": entry.component.name,
            **required(config_class(entry, catalog.kinds[slot.kind])[0], catalog),
        }
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType):
        return a_valid(next(one for one in arguments if one is not NoneType), catalog)
    if origin is Literal:
        return arguments[0]
    if origin in (bool, int, float):
        return origin(4)
    if not isinstance(origin, type):  # Annotated without a slot
        return a_valid(arguments[0], catalog)
    if issubclass(origin, Enum):
        return next(iter(origin)).value
    if attrs.has(origin):
        return required(origin, catalog)
    if issubclass(origin, Mapping):
        return {}
    return [a_valid(one, catalog) for one in arguments if one is not Ellipsis] or "x"
