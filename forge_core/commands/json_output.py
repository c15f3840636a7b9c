"""``--json``: what a command tells to programs, and the classes that say what it is.

A command that prints JSON has ``@json_option(Told)``. ``Told`` is an attrs class with docstrings under its fields, or a
type made of such classes: ``list[Told]``. ``print_json`` prints a value of it. The page of JSON in the documentation is
written from these classes, and a test compares what a command prints with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import click

from forge_core.config.describe import without_passwords


class JsonOption(click.Option):
    """The option ``--json``, and what the documentation and tests have to know of it."""

    def __init__(self, *args: Any, prints: Any, lines: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prints = prints
        """The type of what is printed, or its import path."""
        self.lines = lines
        """A value is printed on each line, rather than one."""


def json_option(prints: Any, *, lines: bool = False, says: str = "Print JSON.") -> Callable[[Any], Any]:
    """The option ``--json`` of a command, whose function is given it as ``as_json``.

    Args:
        prints: the type of what the command prints: an attrs class, or made of some; or the import path of one,
            ``"package.module:Class"``, whose module imports torch.
        says: what ``--help`` says.
        lines: whether the command prints a value of it on each line, rather than one.
    """
    return click.option("--json", "as_json", cls=JsonOption, prints=prints, lines=lines, is_flag=True, help=says)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON, without the passwords of URLs.

    Objects of attrs classes are objects with all their fields, numbers that are not finite are null, and what JSON does
    not know, such as a path, is its text; a class is its import path.

    Args:
        indent: spaces; ``None`` puts everything on one line.
    """
    click.echo(without_passwords(json.dumps(_plain(value), indent=indent)))


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        value = attrs.asdict(value, recurse=False)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
