"""``forge plan``: what a job would take, on any machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import wrapped
from forge_core.contracts.command import options_of
from forge_core.errors import ConfigError
from forge_core.job import catalog_of, load_job
from forge_core.run.process import frozen_imports

if TYPE_CHECKING:
    from rich.status import Status

    from forge_core.config.sections import Job
    from forge_core.contracts.gpu import Gpu
    from forge_plugins_plan.ettr_report import EttrReport
    from forge_plugins_plan.figures import Figures
    from forge_plugins_plan.machine import Machine
    from forge_plugins_plan.report import Plan
    from forge_plugins_plan.run_figures import RunFigures
    from forge_plugins_plan.search import Search


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--world-size",
    type=click.IntRange(1, 131_072),
    metavar="N",
    help="Ranks of the run, up to 131072. A run's directory says how many it had.",
)
@click.option(
    "--ranks-per-node", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="GPUs of one."
)
@click.option("--gpu", metavar="NAME", help="Say whether it fits: a100-40, a100-80, h100, h200, b200.")
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="V", help="The data's, if the job does not say.")
@click.option("--ettr", is_flag=True, help="Say how much of its time a long job trains, failures considered.")
@click.option("--step-seconds", type=float, metavar="S", help="Of a step, for --ettr; planned by default.")
@click.option(
    "--assume", multiple=True, metavar="NAME=NUMBER", help="A figure for --ettr, such as spares=4; repeatable."
)
@click.option("--calibrate", is_flag=True, help="Measure this machine first, a minute, and plan with its times.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Where --calibrate writes what it measures."
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Of --calibrate, whose times are told; by default this machine's, if it has been measured.",
)
@click.option("--search", "searches", is_flag=True, help="Find the fastest layouts of so many ranks that fit.")
@json_option("forge_plugins_plan.told:ToldPlan", says="Print JSON; sizes in bytes, times in seconds.")
@click.pass_obj
def plan(
    obj: Any,
    config: Path,
    overrides: tuple[str, ...],
    world_size: int | None,
    ranks_per_node: int,
    gpu: str | None,
    vocab_size: int | None,
    ettr: bool,
    step_seconds: float | None,
    assume: tuple[str, ...],
    calibrate: bool,
    out: Path | None,
    calibration: Path | None,
    searches: bool,
    as_json: bool,
) -> None:
    """Say what the job in CONFIG would be and take on N ranks: FLOPs, passes, and the memory of a rank.

    The model is built and a step is run on shapes alone, as one of N ranks whose collectives do nothing: it needs
    neither GPU nor data, and a layout that cannot be is refused as a run would refuse it.

    CONFIG may be the directory of a run: the plan is of its job, with what the run has taken beside it.

    OVERRIDES are --section.key=value, section.key=value or --section.key value.

    Exit codes: 0 planned, 2 the job is wrong or a step of it cannot be simulated.
    """
    config, ranks, run = _job_and_ranks(config, overrides, world_size)
    ranks_of_node = min(ranks, ranks_per_node)

    def load(more: Sequence[str]) -> Job:
        return load_job(config, [*overrides, *more], catalog=obj.catalog, world_size=ranks, options=options_of(plan))

    job, instead = _possible(load, ranks_of_node) if searches else (load(()), ())
    from forge_plugins_plan.gpus import gpu_named

    with frozen_imports():
        from forge_plugins_plan.report import make_plan
        from forge_plugins_plan.simulation import without_collections

    _refuse_idle(job, vocab_size, calibrate, out, calibration)
    vocab_size = vocab_size or _vocabulary_of_run(config.parent, run)
    figures = _figures(ettr, step_seconds, assume)
    planned_gpu = gpu_named(gpu) if gpu is not None else None
    if calibrate:
        from forge_plugins_plan.measured_ranks import calibrated

        calibration = calibrated(obj, job, ranks_of_node, out)
        if calibration is None:  # a rank that another process has started to measure
            return
    machine = _machine(job, calibration, planned_gpu, ranks_of_node)
    if searches and machine is None:
        raise ConfigError(
            "--search needs the times of a machine: give --gpu NAME or --calibration FILE, or measure this: --calibrate"
        )
    if figures is not None and step_seconds is None and machine is None:
        raise ConfigError(
            "--ettr needs the time of a step: give --step-seconds S, or --gpu NAME or --calibration FILE to have it "
            "planned, or measure this machine: --calibrate"
        )
    catalog = catalog_of(job, obj.catalog)
    with without_collections(), _saying("a step of a rank is simulated"):
        planned = make_plan(job, catalog, ranks, vocab_size, planned_gpu, ranks_per_node, machine)
    failed = next((stage for stage in planned.stages if stage.reason), None)
    told, seconds = None, planned.time.seconds if step_seconds is None and planned.time is not None else step_seconds
    if figures is not None and failed is None:
        from forge_plugins_plan.ettr_report import report_of

        if seconds is None:
            raise ConfigError("--ettr needs the time of a step, which cannot be planned: give --step-seconds S")
        told = report_of(job, planned, figures, seconds)
    found = None
    if searches and planned.time is not None and machine is not None:
        from forge_plugins_plan.search import search

        with _saying("layouts are looked at") as status:
            found = search(job, load, catalog, planned, machine, status.update, whole=bool(instead))
    _echo(planned, found, told, run, as_json=as_json)
    if failed is not None:
        raise ConfigError(f"the build succeeds, but a step of rank {failed.rank} cannot be simulated: {failed.reason}")


def _possible(load: Callable[[Sequence[str]], Job], ranks_of_node: int) -> tuple[Job, Sequence[str]]:
    """The job, or if its rules refuse its own layout, in a plain one that they allow, and the overrides that make it.

    Raises:
        ConfigError: of the job as it is, if it is refused in any of these.
    """
    try:
        return load(()), ()
    except ConfigError as error:
        for power in range(ranks_of_node.bit_length()):
            degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 2**power, "ep": 1}
            layout = [f"parallel.{axis}={degree}" for axis, degree in degrees.items()]
            for batch in ((), ("train.batch_size=1",)):
                with suppress(ConfigError):
                    job = load([*layout, *batch])
                    if batch and job.train.global_batch_size is None:  # a step would have fewer sequences
                        continue
                    words = " ".join([*layout, *batch])
                    click.echo(
                        f"warning: {error}\nthis layout cannot be; the one that is planned has {words}", err=True
                    )
                    return job, (*layout, *batch)
        raise


def _saying(what: str) -> Status:
    """Words on a terminal while it lasts; elsewhere nothing."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def _job_and_ranks(
    config: Path, overrides: Sequence[str], world_size: int | None
) -> tuple[Path, int, RunFigures | None]:
    """The job's file, its ranks, and the figures of the run whose directory is given in place of a file."""
    from forge_plugins_plan.run_figures import run_figures

    if config.is_dir():
        if overrides or world_size is not None:
            given = overrides[0] if overrides else f"--world-size {world_size}"
            raise ConfigError(
                f"{given}: the run in {config} is planned as it was trained; to plan another one give "
                f"{config / 'job.toml'}"
            )
        run = run_figures(config)
        return config / "job.toml", run.ranks, run
    if world_size is None:
        raise ConfigError(
            "--world-size N is needed: the number of ranks of the run, which a run's directory says itself"
        )
    return config, world_size, None


def _vocabulary_of_run(folder: Path, run: RunFigures | None) -> int | None:
    """That of its newest checkpoint, if it has one. Its tensors, which may be terabytes, are not looked at."""
    from forge_core.checkpoint.contents import read_state
    from forge_core.checkpoint.manifest import DamagedError
    from forge_core.checkpoint.store import CheckpointStore

    store = CheckpointStore(folder / "checkpoints")
    for step in reversed(store.steps() if run is not None else []):
        try:
            found = read_state(store.folder(step)).get("vocab_size")
        except DamagedError:
            continue
        return found if isinstance(found, int) else None
    return None


def _echo(
    planned: Plan, found: Search | None, told: EttrReport | None, run: RunFigures | None, *, as_json: bool
) -> None:
    from forge_plugins_plan import ettr_report, run_figures, search_report
    from forge_plugins_plan.report import as_text

    if as_json:
        from forge_plugins_plan.told import told_plan

        print_json(told_plan(planned, found, told, run))
        return
    lines = [*map(wrapped, as_text(planned))]
    if run is not None:
        lines += ["", *map(wrapped, run_figures.as_text(run, planned))]
    if found is not None:
        lines += ["", *search_report.as_text(found, math.prod(planned.mesh.values()))]
    if told is not None:
        lines += ["", *map(wrapped, ettr_report.as_text(told))]
    click.echo("\n".join(lines))


def _refuse_idle(job: Job, vocab_size: int | None, calibrate: bool, out: Path | None, calibration: Path | None) -> None:
    said = getattr(job.model.config, "vocab_size", None)
    if None not in (vocab_size, said) and vocab_size != said:
        raise ConfigError(
            f"--vocab-size {vocab_size} has no effect: model.vocab_size is {said}; leave one of the two out"
        )
    if out is not None and not calibrate:
        raise ConfigError("--out has no effect without --calibrate")
    if calibrate and calibration is not None:
        raise ConfigError("--calibrate measures, and --calibration reads what has been measured; leave one out")


def _machine(job: Job, file: Path | None, gpu: Gpu | None, ranks_of_node: int) -> Machine | None:
    """Whose times are told: what a file says, or a data sheet, or what has been measured of this machine."""
    from forge_plugins_plan.calibration import default_file, mismatches, read_calibration
    from forge_plugins_plan.machine import published
    from forge_plugins_plan.measured_ranks import present_device, torch_version

    if file is None and gpu is not None:
        return published(gpu)
    device = present_device(job)
    if file is None:
        file = default_file(device, ranks_of_node)
        if not file.is_file():
            return None
    found = read_calibration(file)
    for sentence in mismatches(found, gpu=gpu, device=device, torch_version=torch_version(), ranks=ranks_of_node):
        click.echo(f"warning: {sentence}", err=True)
    return found


def _figures(ettr: bool, step_seconds: float | None, assume: Sequence[str]) -> Figures | None:
    """Figures that ``--ettr`` reckons with; refuses options that would do nothing, before anything is planned."""
    from forge_plugins_plan.figures import figures_with

    if not ettr:
        for name, value in (("--step-seconds", step_seconds), ("--assume", assume)):
            if value not in (None, ()):
                raise ConfigError(f"{name} has no effect without --ettr")
        return None
    if step_seconds is not None and not 0 < step_seconds < math.inf:
        raise ConfigError(f"--step-seconds {step_seconds:g}: must be a number of seconds above 0")
    return figures_with(assume)
