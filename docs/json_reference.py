"""What commands print with ``--json``, from the classes that say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import click
from command_reference import subcommands  # it lies beside this file
from markdown_table import table  # and so does this one

from forge_core.commands.invocation import load_command
from forge_core.config.field_docs import field_docs
from forge_core.registry.catalog import Catalog
from forge_core.registry.hookspecs import CORE_COMMANDS
from forge_testing.json_output import json_option_of, printed_type


def json_reference(catalog: Catalog) -> Iterator[str]:
    """The page."""
    yield "# JSON that commands print"
    yield ""
    yield "Generated from the classes with which commands say what `--json` prints. Only JSON goes to stdout; what is"
    yield "wrong is a sentence on stderr and an [exit code](../running.md#exit-codes), as without it. Every key is"
    yield "always there: `null` stands for what is not known, and in place of a number for one that is not finite."
    yield "Sizes are bytes, times seconds. A [command of a plugin](../hooks/forge_commands.md) says it in the same way."
    yield ""
    for name, command in commands(catalog):
        if option := json_option_of(command):
            yield f"## `{name} --json`"
            yield ""
            what = json_words(printed_type(option))
            yield f"On each line: {what}." if option.lines else f"{what[:1].upper()}{what[1:]}."
            yield ""
            for cls in printed_classes(printed_type(option)):
                yield from _class(cls)


def commands(catalog: Catalog) -> Iterator[tuple[str, click.Command]]:
    """Every command and sub-command, by its words; a group is one, if it does something alone."""
    known = [(command, "forge-core") for command in CORE_COMMANDS]
    known += [(command, plugin.distribution) for command, plugin in catalog.commands.values()]
    for command, owner in sorted(known, key=lambda one: one[0].name):
        yield from _with_subcommands(f"forge {command.name}", load_command(command, owner))


def _with_subcommands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield name, command
    for sub, inner in subcommands(command) if isinstance(command, click.Group) else ():
        yield from _with_subcommands(f"{name} {sub}", inner)


def json_words(annotation: Any) -> str:
    """A type in words, as JSON has it: ``an array of integers``."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType):
        parts = [json_words(one) for one in arguments]
        return ("; or " if any(":" in part for part in parts) else " or ").join(parts)
    if origin is Literal:
        return " or ".join(f'`"{one}"`' for one in arguments)
    if attrs.has(origin):
        return f"`{origin.__name__}`"
    if origin in _WORDS:
        return _WORDS[origin]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"an object, of each key: {json_words(arguments[1])}"
    if origin in (type, Path):
        return _WORDS[str]
    return f"an array, of each: {json_words(arguments[0])}"


_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "null",
    Any: "anything",
}


def printed_classes(annotation: Any) -> Iterator[type]:
    """The attrs classes in a type of what is printed, each before those of its own fields."""
    found: dict[type, None] = {}

    def look(one: Any) -> None:
        if isinstance(one, type) and attrs.has(one) and one not in found:
            found[one] = None
            for field in attrs.fields(attrs.resolve_types(one)):
                look(field.type)
        for argument in get_args(one) if get_origin(one) is not type else ():
            look(argument)

    look(annotation)
    yield from found


def _class(cls: type) -> Iterator[str]:
    docs = field_docs(cls)  # in the words of Python
    yield f"**`{cls.__name__}`**: {' '.join((cls.__doc__ or '').split(chr(10) * 2)[0].split())}"
    yield ""
    about = {name: doc.replace("``None``", "``null``") for name, doc in docs.items()}
    rows = ((f"`{field.name}`", json_words(field.type), about.get(field.name, "")) for field in attrs.fields(cls))
    yield from table(("key", "is", "meaning"), rows)
    yield ""
