"""Docstrings under fields and words for types, as commands and the generated reference show them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import attrs
import pytest

from forge_core.config.field_docs import field_docs, type_words
from forge_core.config.sections import Job, TrainSection
from forge_core.contracts.component_ref import ComponentRef
from forge_core.registry.component import Slot


@attrs.frozen(kw_only=True)
class Base:
    """Not a field's."""

    inherited: int = 1
    """From the base,
    over two lines."""
    replaced: int = 1
    """Old."""


@attrs.frozen(kw_only=True)
class Derived(Base):
    replaced: int = 2
    """New."""
    undocumented: int = 3

    @attrs.frozen
    class Inner:
        x: int = 0
        """Deep inside."""


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


Duration = NewType("Duration", float)


def test_the_docstrings_of_a_class_and_of_what_it_inherits_are_found():
    assert field_docs(Derived) == {"inherited": "From the base,\nover two lines.", "replaced": "New."}
    assert field_docs(Derived.Inner) == {"x": "Deep inside."}


def test_a_class_inside_a_function_has_docstrings_too():
    @attrs.frozen
    class Local:
        x: int
        """Here."""

    assert field_docs(Local) == {"x": "Here."}


def test_a_class_without_source_has_none():
    assert field_docs(attrs.make_class("Made", ["x"])) == {}
    assert field_docs(int) == {}


def test_the_cores_own_sections_are_documented():
    assert field_docs(TrainSection)["seq_len"] == "Tokens a sample."


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "integer"),
        (float | None, "number"),
        (bool, "true or false"),
        (Path, "path"),
        (Any, "anything"),
        (Literal["a", "b"], '"a" or "b"'),
        (Literal[1, True], "1 or true"),
        (Colour, '"red" or "blue"'),
        (Duration, "duration"),
        (tuple[str, ...], "array of strings"),
        (list[Literal["a", "b"]], 'array of "a" or "b"'),
        (tuple[float, float], "array [number, number]"),
        (tuple[Derived, ...], "array of tables"),
        (Mapping[str, int], "table of integers"),
        (Derived, "table"),
        (int | str, "integer or string"),
        (Annotated[ComponentRef, Slot("data_source")], "data source"),
        (Annotated[ComponentRef | None, Slot("router")], "router"),
        (tuple[Annotated[ComponentRef, Slot("callback")], ...], "array of callbacks"),
        (Annotated[int, "a note"], "integer"),
    ],
)
def test_types_are_told_in_the_words_of_toml(annotation, words):
    assert type_words(annotation) == words


def test_every_field_of_a_job_has_words():
    for field in attrs.fields(attrs.resolve_types(Job, include_extras=True)):
        assert "typing" not in type_words(field.type)
