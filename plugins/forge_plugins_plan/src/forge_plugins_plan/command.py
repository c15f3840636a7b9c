"""``forge plan``: what a job would take, on any machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import wrapped
from forge_core.contracts.command import options_of
from forge_core.errors import ConfigError
from forge_core.job import catalog_of, load_job

if TYPE_CHECKING:
    from forge_core.config.sections import Job
    from forge_plugins_plan.ettr_report import EttrReport
    from forge_plugins_plan.figures import Figures
    from forge_plugins_plan.report import Plan


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--world-size",
    type=click.IntRange(1, 131_072),
    metavar="N",
    required=True,
    help="Ranks of the run, up to 131072.",
)
@click.option(
    "--ranks-per-node", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="GPUs of one."
)
@click.option("--gpu", metavar="NAME", help="Say whether it fits: a100-40, a100-80, h100, h200, b200.")
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="V", help="The data's, if the job does not say.")
@click.option("--ettr", is_flag=True, help="Say how much of its time a long job trains, failures considered.")
@click.option("--step-seconds", type=float, metavar="S", help="Of a step, for --ettr; reckoned with --gpu by default.")
@click.option(
    "--assume", multiple=True, metavar="NAME=NUMBER", help="A figure for --ettr, such as spares=4; repeatable."
)
@json_option("forge_plugins_plan.told:ToldPlan", says="Print JSON; sizes in bytes, times in seconds.")
@click.pass_obj
def plan(
    obj: Any,
    config: Path,
    overrides: tuple[str, ...],
    world_size: int,
    ranks_per_node: int,
    gpu: str | None,
    vocab_size: int | None,
    ettr: bool,
    step_seconds: float | None,
    assume: tuple[str, ...],
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

    figures = _figures(gpu, ettr, step_seconds, assume)
    planned = make_plan(
        job,
        catalog_of(job, obj.catalog),
        world_size,
        vocab_size,
        gpu_named(gpu) if gpu is not None else None,
        ranks_per_node,
    )
    failed = next((stage for stage in planned.stages if stage.reason), None)
    told = None if figures is None or failed is not None else _ettr(job, planned, figures, step_seconds)
    if as_json:
        from forge_plugins_plan.told import told_plan

        print_json(told_plan(planned, told))
    else:
        click.echo("\n".join(map(wrapped, as_text(planned))))
        if told is not None:
            from forge_plugins_plan import ettr_report

            click.echo("\n".join(["", *map(wrapped, ettr_report.as_text(told))]))
    if failed is not None:
        raise ConfigError(f"the build succeeds, but a step of rank {failed.rank} cannot be simulated: {failed.reason}")


def _figures(gpu: str | None, ettr: bool, step_seconds: float | None, assume: Sequence[str]) -> Figures | None:
    """Those that ``--ettr`` reckons with; refuses options that would do nothing, before anything is planned."""
    from forge_plugins_plan.figures import figures_with

    if not ettr:
        for name, value in (("--step-seconds", step_seconds), ("--assume", assume)):
            if value not in (None, ()):
                raise ConfigError(f"{name} has no effect without --ettr")
        return None
    if step_seconds is not None and not 0 < step_seconds < math.inf:
        raise ConfigError(f"--step-seconds {step_seconds:g}: must be a number of seconds above 0")
    if step_seconds is None and gpu is None:
        raise ConfigError("--ettr needs the time of a step: give --step-seconds S, or --gpu NAME to have it reckoned")
    return figures_with(assume)


def _ettr(job: Job, planned: Plan, figures: Figures, step_seconds: float | None) -> EttrReport:
    from forge_plugins_plan.ettr_report import report_of, seconds_of_step

    return report_of(job, planned, figures, step_seconds or seconds_of_step(planned, figures))
