"""``forge validate``: everything that can be known before a run, without torch, data or a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from forge_core.contracts.command import options_of


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Check the job for this number of ranks.")
@click.pass_context
def validate(ctx: click.Context, config: Path, overrides: tuple[str, ...], world_size: int | None) -> None:
    """Check the job in CONFIG and report every problem at once, each with the file and line.

    OVERRIDES are --section.key=value, section.key=value or --section.key value.

    Exit codes: 0 valid, 2 not.
    """
    from forge_core.job import catalog_of, load_job, notes, sort_passes, summary

    job = load_job(config, overrides, catalog=ctx.obj.catalog, world_size=world_size, options=options_of(ctx.command))
    catalog = catalog_of(job, ctx.obj.catalog)
    for line in notes(job, catalog):
        click.echo(f"note: {line}", err=True)
    passes = [use.name for use in sort_passes(job, catalog)]
    click.echo(f"{config} is valid: {summary(job, world_size)}; passes: {', '.join(passes) or 'none'}")
