"""``forge vlm inspect``: the images and the text that a step will see, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_core.contracts.batch import NamesSources
from forge_core.contracts.command import options_of
from forge_core.errors import ConfigError
from forge_core.job import catalog_of

if TYPE_CHECKING:
    from forge_core.contracts.command import Invocation


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--step", default=1, show_default=True, type=click.IntRange(min=1), help="The step whose batch is shown.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="The page, .html; by default <CONFIG>_step_<N>.html in this folder."
)
@click.option("--world-size", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks of the run.")
@click.pass_obj
def inspect(
    invocation: Invocation, config: Path, overrides: tuple[str, ...], step: int, out: Path | None, world_size: int
) -> None:
    """Write the images and the text that a step of the job CONFIG, with OVERRIDES, will see as one page, which shows
    what is learned."""
    from forge_plugins_data.inspection import job_on, opened, spans
    from forge_plugins_vlm.data.page import page_of
    from forge_plugins_vlm.data.source import ImageText

    out = out or Path(f"{config.stem}_step_{step}.html")
    if out.suffix != ".html":
        raise ConfigError(f"--out {out}: must end with .html")
    job = job_on(world_size, config, overrides, invocation.catalog, options_of(inspect))
    with opened(job, catalog_of(job, invocation.catalog)) as data:
        found, batch = data.step(step)
        source = data.source
    if "pixels" not in batch or source.tokenizer is None:
        raise ConfigError(f"data.name = {job.data.name!r}: its batches have no images; forge data inspect shows text")
    facts = [f"{job.data.name}: samples {spans(found.numbers)} of the stream, {found.targets:,} targets"]
    if isinstance(source, ImageText):
        facts.append(", ".join(f"{number:,} {name}" for name, number in source.counts.items()))
    names = source.names if isinstance(source, NamesSources) else ()
    page = page_of(f"{config.name}, step {step}", facts, batch, source.tokenizer, names)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    for fact in facts:
        click.echo(fact)
    click.echo(f"{out}: {len(batch['tokens'])} samples of step {step}")
