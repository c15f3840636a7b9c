"""``forge origins``: where each value of a resolved job was written. ``forge config --origins`` is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import aligned
from forge_core.config.describe import literal, without_passwords
from forge_core.config.diff import leaves
from forge_core.config.overrides import with_overrides
from forge_core.config.problems import Location, key_path
from forge_core.config.sections import Job
from forge_core.config.shorthands import as_written
from forge_core.config.toml_file import Document, read_document
from forge_core.contracts.command import Invocation, options_of
from forge_core.job import SECTIONS, components, job_table, load_job

_LONG = 200
"""Characters."""
_TEXTS = ("plugins", "files")
"""The names of files in a configuration, their texts in the resolved job."""


@attrs.frozen
class Origin:
    """One value of a resolved job."""

    key: str
    """Such as ``callbacks[0].interval``."""
    value: Any
    place: Location | None
    """``None`` where it was not written: it is the default, or follows from other values."""


@attrs.frozen(kw_only=True)
class ToldOrigin:
    """One value of a resolved job, and where it was written."""

    key: str
    """Such as ``callbacks[0].interval``."""
    value: Any
    origin: Literal["file", "setting", "default"]
    """``default`` stands for what was not written: defaults, and what follows from other values."""
    source: str | None
    """The file, or the setting as it was typed."""
    line: int | None
    """Counts from 1."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Resolve the job for this number of ranks.")
@json_option(list[ToldOrigin])
@click.pass_context
def origins(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    world_size: int | None = None,
    as_json: bool = False,
) -> None:
    """Print each value of the job in CONFIG with where it comes from: file and line, setting, or default.

    OVERRIDES are --section.key=value, section.key=value or --section.key value.
    """
    obj: Invocation = ctx.obj
    job = load_job(config, overrides, catalog=obj.catalog, world_size=world_size, options=options_of(ctx.command))
    found = [*origins_of(job, with_overrides(read_document(config), overrides, sections=SECTIONS))]
    if as_json:
        print_json([_told(one) for one in found])
    else:
        lines = [(f"{one.key} = {in_short(one.value)}", str(one.place or "default")) for one in found]
        click.echo("\n".join(without_passwords(line) for line in aligned(lines)))


def in_short(value: Any) -> str:
    """A value in the words of TOML; of a long one, such as the text of a plugin file, the beginning."""
    text = literal(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"


def origins_of(job: Job, document: Document) -> Iterator[Origin]:
    """The values of the job in its order, and where ``document``, of which it was made, has them."""
    uses = [(at, use.written) for at, use in components(job) if use.written]
    for key, value in leaves(job_table(job)):
        way = key_path(key)
        way = _TEXTS if way[: len(_TEXTS)] == _TEXTS else way
        for at, written in uses:  # of a component with shorthands
            if way[: len(at)] == at:
                way = (*at, *as_written(way[len(at) :], written))
        yield Origin(key, value, document.locate(way) if _is_written(document.table, way) else None)


def _is_written(table: Any, way: Sequence[str | int]) -> bool:
    for part in way:
        if isinstance(table, str):
            return part == "name"  # optimizer = "adamw"
        there = table if isinstance(table, dict) else range(len(table)) if isinstance(table, list) else ()
        if part not in there:
            return False
        table = table[part]
    return True


def _told(one: Origin) -> ToldOrigin:
    if (place := one.place) is None:
        return ToldOrigin(key=one.key, value=one.value, origin="default", source=None, line=None)
    origin: Literal["file", "setting"] = "setting" if place.is_override else "file"
    return ToldOrigin(key=one.key, value=one.value, origin=origin, source=place.source, line=place.line)
