"""``forge config``: what a configuration resolves to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.diff import Difference, differences
from forge_core.contracts.command import options_of


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", required=False, type=click.UNPROCESSED)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Resolve the job for this number of ranks.")
@click.option("--schema", is_flag=True, help="Short for forge schema: the JSON Schema of a file.")
@click.option("--origins", is_flag=True, help="Short for forge origins: where each value comes from.")
@click.option(
    "--diff",
    nargs=2,
    metavar="A B",
    type=click.Path(path_type=Path),
    help="Print how the resolved job of B differs from that of A: ~ changed, + added, - removed.",
)
@json_option(dict[str, Any] | list[Difference], says="Print JSON: the keys of the TOML; with --diff, what differs.")
@click.pass_context
def config(
    ctx: click.Context,
    config: str | None,
    overrides: tuple[str, ...],
    world_size: int | None,
    schema: bool,
    origins: bool,
    diff: tuple[Path, Path] | None,
    as_json: bool,
) -> None:
    """Print the job in CONFIG with every default, and every component by its qualified name, as TOML.

    OVERRIDES are --section.key=value, section.key=value or --section.key value; ~section.key takes a key back.
    With --diff they apply to both files.
    """
    from forge_core.job import dump_job, job_table, load_job

    def resolved(path: Path, settings: tuple[str, ...]) -> Any:
        return load_job(path, settings, catalog=ctx.obj.catalog, world_size=world_size, options=options_of(ctx.command))

    forge: Any = ctx.find_root().command
    if schema and config is not None:
        raise click.UsageError(f"--schema is about every configuration and takes no file or setting, got {config}", ctx)
    if schema:
        ctx.invoke(forge.resolve_command(ctx.find_root(), ["schema"])[1])  # of a package, as no run needs it
    elif diff is not None:
        settings = overrides if config is None else (config, *overrides)
        old, new = (job_table(resolved(path, settings)) for path in diff)
        _print_differences(differences(old, new), diff, as_json)
    elif config is None:
        raise click.UsageError("Missing argument 'CONFIG'.", ctx)
    elif origins:
        _, command, _ = forge.resolve_command(ctx.find_root(), ["origins"])  # the same
        ctx.invoke(command, config=Path(config), overrides=overrides, world_size=world_size, as_json=as_json)
    elif as_json:
        print_json(job_table(resolved(Path(config), overrides)))
    else:
        click.echo(dump_job(resolved(Path(config), overrides)), nl=False)


def _print_differences(changes: Sequence[Difference], files: tuple[Path, Path], as_json: bool) -> None:
    if as_json:
        print_json(changes)
    else:
        click.echo("\n".join(map(_line, changes)) if changes else f"{files[0]} and {files[1]} are the same job")


def _line(change: Difference) -> str:
    from forge_core.config.describe import literal

    if change.old is None:
        return f"+ {change.key}: {literal(change.new)}"
    if change.new is None:
        return f"- {change.key}: {literal(change.old)}"
    return f"~ {change.key}: {literal(change.old)} -> {literal(change.new)}"
