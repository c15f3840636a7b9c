"""``forge plan``: what a job would take, on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from forge_core.contracts.command import options_of
from forge_core.errors import ConfigError
from forge_core.job import load_job


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--world-size",
    type=click.IntRange(1, 1_048_576),
    metavar="N",
    required=True,
    help="Ranks of the run, up to 1048576.",
)
@click.option(
    "--ranks-per-node", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="GPUs of one."
)
@click.option("--gpu", metavar="NAME", help="Say whether it fits: a100-40, a100-80, h100, h200, b200.")
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="V", help="The data's, if the job does not say.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; sizes in bytes.")
@click.pass_obj
def plan(
    obj: Any,
    config: Path,
    overrides: tuple[str, ...],
    world_size: int,
    ranks_per_node: int,
    gpu: str | None,
    vocab_size: int | None,
    as_json: bool,
) -> None:
    """Say what the job in CONFIG would be and take on N ranks: FLOPs, passes, and the memory of a rank.

    The model is built and a step is run on shapes alone, as one of N ranks whose collectives do nothing: it needs
    neither GPU nor data, and a layout that cannot be is refused as a run would refuse it.

    OVERRIDES are --section.key=value, section.key=value or --section.key value.

    Exit codes: 0 planned, 2 the job is wrong or a step of it cannot be simulated.
    """
    job = load_job(config, overrides, catalog=obj.catalog, world_size=world_size, options=options_of(plan))
    from forge_plugins_plan.gpus import gpu_named
    from forge_plugins_plan.report import as_text, make_plan

    planned = make_plan(
        job,
        obj.catalog(job.plugins.disable),
        world_size,
        vocab_size,
        gpu_named(gpu) if gpu is not None else None,
        ranks_per_node,
    )
    if as_json:
        click.echo(json.dumps(planned.as_json(), indent=2))
    else:
        click.echo("\n".join(as_text(planned)))
    failed = next((stage for stage in planned.stages if stage.reason), None)
    if failed is not None:
        raise ConfigError(f"the build succeeds, but a step of rank {failed.rank} cannot be simulated: {failed.reason}")
