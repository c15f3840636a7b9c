"""``forge validate``: everything that can be known before a run, without torch, data or a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.problems import ConfigProblems, Location, Problem, key_text
from forge_core.contracts.command import options_of
from forge_core.errors import ConfigError


@attrs.frozen(kw_only=True)
class ToldProblem:
    """One thing to mend."""

    file: str | None = None
    """The file in which the value stands, as it was named; null if that is a setting, or not known."""
    line: int | None = None
    """Counts from 1; null where a whole file is meant."""
    setting: str | None = None
    """The setting of the command line that has the value, as typed."""
    key: str = ""
    """Such as ``callbacks[0].interval``; empty for the whole configuration."""
    message: str
    """A sentence: what is wrong, the value found, and what is allowed."""
    nearest: str | None = None
    """The valid name that the sentence proposes."""
    allowed: Mapping[str, Any] | None = None
    """All that is valid there, in keywords of JSON Schema: ``enum`` has names of keys or components, or values,
    ``minimum`` a bound, ``type`` a type; null where only the sentence says it."""


@attrs.frozen(kw_only=True)
class Validation:
    """All that is to be said of a configuration."""

    config: Path
    valid: bool
    problems: Sequence[ToldProblem] = ()
    """All of them, in the order of their lines."""
    summary: str = ""
    """The model, the data and the layout in a few words, if it is valid."""
    passes: Sequence[str] = ()
    """Names, in the order in which passes change the model."""
    notes: Sequence[str] = ()
    """Sentences about what is allowed, and perhaps not meant."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Check the job for this number of ranks.")
@json_option(Validation)
@click.pass_context
def validate(
    ctx: click.Context, config: Path, overrides: tuple[str, ...], world_size: int | None, as_json: bool
) -> None:
    """Check the job in CONFIG and report every problem at once, each with the file and line.

    OVERRIDES are --section.key=value, section.key=value or --section.key value; ~section.key takes a key back.

    Exit codes: 0 valid, 2 not.
    """
    from forge_core.job import catalog_of, load_job, notes, sort_passes, summary

    options = options_of(ctx.command)
    try:
        job = load_job(config, overrides, catalog=ctx.obj.catalog, world_size=world_size, options=options)
        catalog = catalog_of(job, ctx.obj.catalog)
    except ConfigError as error:
        if as_json:
            print_json(Validation(config=config, valid=False, problems=[*_told(error)]))
        raise
    said = [*notes(job, catalog)]
    for line in said:
        click.echo(f"note: {line}", err=True)
    passes, words = [use.name for use in sort_passes(job, catalog)], summary(job, world_size)
    if as_json:
        print_json(Validation(config=config, valid=True, summary=words, passes=passes, notes=said))
    else:
        click.echo(f"{config} is valid: {words}; passes: {', '.join(passes) or 'none'}")


def _told(error: ConfigError) -> Iterator[ToldProblem]:
    for problem in error.problems if isinstance(error, ConfigProblems) else [Problem((), str(error))]:
        at, near = problem.location or Location(""), re.search(r"[Dd]id you mean '?([^'?]+)", problem.sentence)
        yield ToldProblem(
            file=None if at.is_override else at.source or None,
            line=at.line,
            setting=at.source if at.is_override else None,
            key=key_text(problem.path),
            message=problem.sentence,
            nearest=near and near[1],
            allowed=problem.allowed,
        )
