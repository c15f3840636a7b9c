"""``forge sweep``: the runs of a grid, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.describe import literal, printable
from forge_core.config.diff import differences
from forge_core.contracts.command import Invocation, options_of
from forge_core.errors import ConfigError, ExitCode
from forge_core.job import dump_job, job_table, read_document
from forge_plugins_studies.gpus import gpus_for, visible_gpus
from forge_plugins_studies.processes import Ended, Task, run_tasks, state_of
from forge_plugins_studies.results import SweptRun, last_event, print_results, swept_runs
from forge_plugins_studies.study import Study, load_study


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    required=True,
    metavar="KEY=V,V",
    help="A run for each value. Repeated, a run for each combination.",
)
@click.option("--parallel", type=click.IntRange(min=1), default=1, metavar="N", help="Runs side by side.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, metavar="N", help="Processes of each run.")
@click.option("--dry-run", is_flag=True, help="Check every run and list them; start nothing, write nothing.")
@json_option(list[SweptRun])
@click.pass_obj
def sweep(
    obj: Invocation,
    config: Path,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    parallel: int,
    nproc: int,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train the job in CONFIG once for each value of a key, or for each combination of values of several.

    OVERRIDES are settings of all runs. Every run is checked before one starts. The same command goes on: what is at its
    end stays as it is. Each run has its own directory; what it prints, its configuration and a report of all are in
    <run.dir>/<name>-sweep.

    Exit codes: 0 all reached their end, 2 a run cannot start, 3 stopped early; otherwise that of the first run that
    failed, after all others.
    """
    study = load_study(config, overrides, sweeps, catalog=obj.catalog, world_size=nproc, options=options_of(sweep))
    _refuse_other_jobs(study)
    parallel = min(parallel, len(study.jobs))
    gpus = [] if parallel == 1 or all(job.run.device == "cpu" for job in study.jobs) else visible_gpus(os.environ)
    if gpus and len(gpus) < parallel * nproc:
        raise ConfigError(
            f"--parallel {parallel}: that takes {parallel * nproc} GPUs, {nproc} a run, and there are {len(gpus)}"
        )
    if dry_run and as_json:
        print_json(swept_runs(study, {}))
        return ExitCode.COMPLETED
    if dry_run:
        for run, point in zip(study.runs, study.points, strict=True):
            click.echo(f"{run.name}: {' '.join(point.overrides)}")
        return ExitCode.COMPLETED
    tasks = write_jobs(study, nproc)

    disabled = {"FORGE_DISABLE_PLUGINS": ",".join([*obj.disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")])}

    def variables(place: int) -> dict[str, str]:
        return {**disabled, **share_of_cores(parallel * nproc), **gpus_for(place, nproc, gpus)}

    tell = partial(_tell, to_stderr=as_json)
    ended = _at_their_ends(study, tasks)
    for task in tasks:
        if task.name in ended:
            tell(task, ended[task.name])
    ended |= run_tasks([one for one in tasks if one.name not in ended], parallel, variables, tell)
    states = {name: state_of(one.code) for name, one in ended.items()}
    if as_json:
        print_json(swept_runs(study, states))
    else:
        print_results(study, states)
    _report(study, disabled, to_stderr=as_json)
    return _code(tasks, ended)


def write_jobs(study: Study, nproc: int) -> list[Task]:
    """Each run's job, as a file that ``forge run`` takes by itself, too."""
    tasks = []
    try:
        study.folder.mkdir(parents=True, exist_ok=True)
        for job in study.jobs:
            name = str(job.run.name)
            file = study.folder / f"{name}.toml"
            file.write_text(dump_job(job), encoding="utf-8")
            words = ["run", str(file), *(["--nproc", str(nproc)] if nproc > 1 else [])]
            tasks.append(Task(name=name, arguments=words, log=study.folder / f"{name}.log"))
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {error.filename}: {error.strerror}") from error
    return tasks


def _at_their_ends(study: Study, tasks: Sequence[Task]) -> dict[str, Ended]:
    """Runs that have nothing left to do, by name. Starting one to find that out takes seconds; one with a mirror may
    have something to upload."""
    return {
        task.name: Ended(code=ExitCode.COMPLETED, seconds=0.0, output="")
        for task, run, job in zip(tasks, study.runs, study.jobs, strict=True)
        if last_event(run) == ("completed", job.train.steps)
        and not job.checkpoint.mirror
        and _has_whole_end(run, job.train.steps)
    }


def _has_whole_end(run: Path, step: int) -> bool:
    """Return whether a run has its checkpoint of a step, as far as names and sizes of files tell."""
    from forge_core.checkpoint.manifest import DamagedError, read_manifest, visible_damage  # imports torch
    from forge_core.checkpoint.store import CheckpointStore

    folder = CheckpointStore(run / "checkpoints").folder(step)
    try:
        return visible_damage(folder, read_manifest(folder).files) is None
    except DamagedError:
        return False


def share_of_cores(processes: int) -> dict[str, str]:
    """The environment in which each of several processes has its share of the cores, unless somebody has said so."""
    if processes == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // processes))}


def _refuse_other_jobs(study: Study) -> None:
    """A run that is there goes on, and must not be taken for one of other settings.

    Raises:
        ConfigError: one has been started with other keys of what decides its losses.
    """
    for run, job in zip(study.runs, study.jobs, strict=True):
        if not (run / "job.toml").is_file():
            continue
        for one in differences(read_document(run / "job.toml").table, job_table(job)):
            section = one.key.partition(".")[0].partition("[")[0]
            if section in _DECIDE and one.key not in _MAY_CHANGE:
                was, now = (literal(value) if value is not None else "its default" for value in (one.old, one.new))
                raise ConfigError(
                    f"{run} has been started with {one.key} = {was}, and would now have {now}; choose another run.name "
                    "for this study, or remove that run"
                )


_DECIDE = ("model", "data", "train", "optimizer", "scheduler", "loss", "parametrization", "anomalies", "phases")
_MAY_CHANGE = ("train.steps", "train.global_batch_size", "train.grad_accumulation")
"""A run may be made longer; the other two follow from each other."""


def _tell(task: Task, ended: Ended | None, *, to_stderr: bool) -> None:
    if ended is None:
        click.echo(f"{task.name}: started", err=to_stderr)
    else:
        is_well = ended.code in (ExitCode.COMPLETED, ExitCode.STOPPED)
        why = "" if is_well else f": {printable(ended.output)} (see {task.log})"
        click.echo(f"{task.name}: {state_of(ended.code)} after {ended.seconds:.0f} s{why}", err=to_stderr)


def _report(study: Study, variables: Mapping[str, str], *, to_stderr: bool) -> None:
    """By ``forge report``, if it is installed."""
    started = [str(run) for run in study.runs if (run / "metrics.jsonl").exists()]
    if not started:
        return
    command = [sys.executable, "-P", "-m", "forge_core", "report", *started, "--out", str(study.folder / "report.html")]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    last = (done.stdout if done.returncode == 0 else f"note: no report: {done.stderr}").strip().splitlines()
    click.echo(printable(last[-1]), err=to_stderr or done.returncode != 0)


def _code(tasks: Sequence[Task], ended: Mapping[str, Ended]) -> int:
    """The exit code of the study."""
    codes = [ended[task.name].code for task in tasks if task.name in ended]
    failed = [code for code in codes if code not in (ExitCode.COMPLETED, ExitCode.STOPPED)]
    if failed:
        return failed[0] if failed[0] > 0 else ExitCode.UNEXPECTED
    return ExitCode.STOPPED if ExitCode.STOPPED in codes or len(ended) < len(tasks) else ExitCode.COMPLETED
