"""``forge sweep``: the runs of a grid, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from forge_core.config.describe import printable
from forge_core.contracts.command import Invocation, options_of
from forge_core.errors import ConfigError, ExitCode
from forge_core.job import dump_job
from forge_plugins_studies.gpus import gpus_for, visible_gpus
from forge_plugins_studies.processes import Ended, Task, run_tasks, state_of
from forge_plugins_studies.results import print_results
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
@click.pass_obj
def sweep(
    obj: Invocation,
    config: Path,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    parallel: int,
    nproc: int,
    dry_run: bool,
) -> int:
    """Train the job in CONFIG once for each value of a key, or for each combination of values of several.

    OVERRIDES are settings of all runs. Every run is checked before one starts. The same command goes on: what is at its
    end stays as it is. Each run has its own directory; what it prints, its configuration and a report of all are in
    <run.dir>/<name>-sweep.

    Exit codes: 0 all reached their end, 2 a run cannot start, 3 stopped early; otherwise that of the first run that
    failed, after all others.
    """
    study = load_study(config, overrides, sweeps, catalog=obj.catalog, world_size=nproc, options=options_of(sweep))
    if dry_run:
        for run, point in zip(study.runs, study.points, strict=True):
            click.echo(f"{run.name}: {' '.join(point.overrides)}")
        return ExitCode.COMPLETED
    gpus = [] if parallel == 1 or all(job.run.device == "cpu" for job in study.jobs) else visible_gpus(os.environ)
    if gpus and len(gpus) < parallel * nproc:
        raise ConfigError(
            f"--parallel {parallel}: that takes {parallel * nproc} GPUs, {nproc} a run, and there are {len(gpus)}"
        )
    tasks = _write(study, nproc)

    def variables(place: int) -> dict[str, str]:
        return {
            "FORGE_DISABLE_PLUGINS": ",".join([*obj.disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")]),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(_threads(parallel * nproc)),
            **gpus_for(place, nproc, gpus),
        }

    ended = run_tasks(tasks, parallel, variables, _tell)
    print_results(study, {name: state_of(one.code) for name, one in ended.items()})
    _report(study)
    return _code(tasks, ended)


def _write(study: Study, nproc: int) -> list[Task]:
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


def _threads(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


def _tell(task: Task, ended: Ended | None) -> None:
    if ended is None:
        click.echo(f"{task.name}: started")
    else:
        click.echo(f"{task.name}: {state_of(ended.code)} after {ended.seconds:.0f} s{_last_words(task, ended)}")


def _last_words(task: Task, ended: Ended) -> str:
    """The last line of a run that has failed, and where the others are."""
    if ended.code in (ExitCode.COMPLETED, ExitCode.STOPPED):
        return ""
    lines = task.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {printable(lines[-1]) if lines else 'it said nothing'} (see {task.log})"


def _report(study: Study) -> None:
    """By ``forge report``, if it is installed."""
    started = [str(run) for run in study.runs if (run / "metrics.jsonl").exists()]
    if not started:
        return
    command = [sys.executable, "-P", "-m", "forge_core", "report", *started, "--out", str(study.folder / "report.html")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    last = (done.stdout if done.returncode == 0 else f"note: no report: {done.stderr}").strip().splitlines()
    click.echo(printable(last[-1]), err=done.returncode != 0)


def _code(tasks: Sequence[Task], ended: Mapping[str, Ended]) -> int:
    """The exit code of the study."""
    codes = [ended[task.name].code for task in tasks if task.name in ended]
    failed = [code for code in codes if code not in (ExitCode.COMPLETED, ExitCode.STOPPED)]
    if failed:
        return failed[0] if failed[0] > 0 else ExitCode.UNEXPECTED
    return ExitCode.STOPPED if ExitCode.STOPPED in codes or len(ended) < len(tasks) else ExitCode.COMPLETED
