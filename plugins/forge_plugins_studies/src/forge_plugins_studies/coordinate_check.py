"""``forge coordinate-check``: whether activations keep their size in models of other widths and depths."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import aligned
from forge_core.config.builder import ComponentBuilder
from forge_core.config.describe import printable
from forge_core.config.sections import CheckpointSection, EvalSection, Job, MetricsSection
from forge_core.contracts.command import Invocation, options_of
from forge_core.errors import ConfigError, ExitCode
from forge_core.job import catalog_of
from forge_plugins_studies.command import share_of_cores, write_jobs
from forge_plugins_studies.config import COORDINATES, PLACES
from forge_plugins_studies.processes import Ended, Task, run_tasks
from forge_plugins_studies.results import flush_right
from forge_plugins_studies.study import Study, load_study

_FLAT = 0.3
"""Exponents up to here count as flat. Without a parametrization that of logits over width is 0.4 to 1."""


@attrs.frozen(kw_only=True)
class Size:
    """A model of the grid, and what its run has measured."""

    dim: int
    n_layers: int
    steps: Sequence[Mapping[str, float]]
    """The values of each logged step, by ``size/embed`` and so on; the first before any update."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--widths", default="", metavar="D,D", help="Values of model.dim, such as 64,128,256,512.")
@click.option("--depths", default="", metavar="L,L", help="Values of model.n_layers, such as 4,8.")
@click.option("--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Updates of each model.")
@click.option("--seeds", type=click.IntRange(min=1), default=2, show_default=True, help="Models of each size.")
@click.option("--parallel", type=click.IntRange(min=1), default=1, metavar="N", help="Runs side by side.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a page with pictures (forge report).")
@json_option(list[Size], says="Print JSON: everything that was measured.")
@click.pass_obj
def coordinate_check(
    obj: Invocation,
    config: Path,
    overrides: tuple[str, ...],
    widths: str,
    depths: str,
    steps: int,
    seeds: int,
    parallel: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Train the job in CONFIG for a few steps with each width and each depth, and compare the sizes of activations.

    All else is as the file and OVERRIDES say, but for the schedule, which is constant. Under a parametrization that
    holds, the change that training makes to activations does not depend on the width, nor on the depth.

    Exit codes: 0 measured, 2 a run cannot start, 3 stopped early; otherwise that of the run that failed.
    """
    grid = [
        f"{key}={_numbers(option, text)}"
        for option, key, text in (("--widths", "model.dim", widths), ("--depths", "model.n_layers", depths))
        if text
    ]
    if not grid:
        raise ConfigError("coordinate-check: give --widths, --depths, or both, such as --widths 64,128,256")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")
    first = load_study(config, overrides, [], catalog=obj.catalog, world_size=1, options=options_of(coordinate_check))
    if seeds > 1:
        seed = first.jobs[0].train.seed
        grid.append(f"train.seed={','.join(str(seed + n) for n in range(seeds))}")
    study = load_study(config, overrides, grid, catalog=obj.catalog, world_size=1, options=options_of(coordinate_check))
    folder = Path(tempfile.mkdtemp(prefix="forge-coordinates-"))
    try:
        build = ComponentBuilder(catalog_of(study.jobs[0], obj.catalog))
        short = attrs.evolve(study, jobs=[_short(job, steps, folder, build) for job in study.jobs])
        tasks = write_jobs(short, 1)
        ended = _run(tasks, min(parallel, len(tasks)), obj.disabled, quiet=as_json)
        if len(ended) < len(tasks) or ExitCode.STOPPED in (one.code for one in ended.values()):
            return ExitCode.STOPPED
        if failed := [(task, ended[task.name]) for task in tasks if ended[task.name].code]:
            task, end = failed[0]
            click.echo(f"error: {task.name}: {printable(end.output)}", err=True)
            return end.code if end.code > 0 else ExitCode.UNEXPECTED
        sizes = _mean_of_seeds([_measured(run, job) for run, job in zip(short.runs, short.jobs, strict=True)])
        if as_json:
            print_json(sizes)
        else:
            print_sizes(sizes)
        return _page(short, out, obj.disabled) if out else ExitCode.COMPLETED
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _numbers(option: str, text: str) -> str:
    """The numbers of an option, checked."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts) or len(set(map(int, parts))) < 2:
        raise ConfigError(f"{option} {text}: expected two or more numbers above 0, such as 64,128,256")
    return ",".join(parts)


def _short(job: Job, steps: int, folder: Path, build: ComponentBuilder) -> Job:
    """The job for a few steps at one rate, without what such a run has no use for."""
    return attrs.evolve(
        job,
        run=attrs.evolve(job.run, dir=folder),
        train=attrs.evolve(job.train, steps=steps + 1),  # activations are measured before the update of a step
        scheduler=build.resolve("scheduler", "none"),
        callbacks=(build.resolve("callback", "coordinates"),),
        metrics=MetricsSection(interval=1),
        checkpoint=CheckpointSection(interval=0, resume="never"),
        eval=EvalSection(),
        evaluations=(),
        trackers=(),
        phases=(),
    )


def _run(tasks: Sequence[Task], parallel: int, disabled: Sequence[str], *, quiet: bool) -> dict[str, Ended]:
    def tell(task: Task, ended: Ended | None) -> None:
        if ended is None and not quiet:
            click.echo(f"{task.name}: started", err=True)

    return run_tasks(tasks, parallel, lambda _: {**_disabling(disabled), **share_of_cores(parallel)}, tell)


def _disabling(disabled: Sequence[str]) -> dict[str, str]:
    return {"FORGE_DISABLE_PLUGINS": ",".join([*disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")])}


def _measured(run: Path, job: Job) -> Size:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    start = f"{COORDINATES}/"
    steps = [
        {key.removeprefix(start): float(value) for key, value in line.items() if key.startswith(start)}
        for line in lines
        if f"{COORDINATES}/size/{PLACES[0]}" in line
    ]
    model: Any = job.model.config
    return Size(dim=model.dim, n_layers=model.n_layers, steps=steps)


def _mean_of_seeds(measured: Sequence[Size]) -> list[Size]:
    """One of each size."""
    alike: dict[tuple[int, int], list[Size]] = {}
    for one in measured:
        alike.setdefault((one.dim, one.n_layers), []).append(one)
    return [
        attrs.evolve(
            models[0],
            steps=[
                {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
                for steps in zip(*(model.steps for model in models), strict=True)
            ],
        )
        for models in alike.values()
    ]


def print_sizes(sizes: Sequence[Size]) -> None:
    """Print the change of each place after the last update, a column a model, and how it grows."""
    axes = [axis for axis in ("dim", "n_layers") if len({getattr(size, axis) for size in sizes}) > 1]
    names = {"dim": "width", "n_layers": "depth"}
    models = (f"{size.dim} × {size.n_layers}" for size in sizes)
    table = [("mean change of", *models, *(f"~ {names[axis]}^" for axis in axes))]
    steep: list[str] = []
    for place in PLACES:
        values = [size.steps[-1][f"change/{place}"] for size in sizes]
        powers = exponents(sizes, values, axes)
        steep += [f"{place} as {names[a]}^{p:.2f}" for a, p in zip(axes, powers, strict=True) if not abs(p) <= _FLAT]
        table.append((place, *(f"{value:.4f}" for value in values), *(f"{power:+.2f}" for power in powers)))
    click.echo("\n".join(aligned(flush_right(table, 1))))
    n = len(sizes[0].steps) - 1
    said = f"not flat after {n} updates: {', '.join(steep)}" if steep else f"flat after {n} updates"
    click.echo(f"{said} (flat is an exponent between -{_FLAT} and {_FLAT})")


def exponents(sizes: Sequence[Size], values: Sequence[float], axes: Sequence[str]) -> list[float]:
    """The exponents p, q of ``value ~ dim^p · n_layers^q``, by least squares of logarithms; NaN where a value is not
    above 0 and finite."""
    import numpy as np

    if not all(math.isfinite(value) and value > 0 for value in values):
        return [math.nan] * len(axes)
    rows = [[1.0, *(math.log(getattr(size, axis)) for axis in axes)] for size in sizes]
    solution = np.linalg.lstsq(np.array(rows), np.log(values), rcond=None)[0]
    return [float(power) for power in solution[1:]]


def _page(study: Study, out: Path, disabled: Sequence[str]) -> int:
    """By ``forge report``, which draws the section of coordinates."""
    command = [sys.executable, "-P", "-m", "forge_core", "report", *map(str, study.runs), "--out", str(out)]
    environment = {**os.environ, **_disabling(disabled)}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ConfigError(printable(done.stderr.strip()).removeprefix("error: "))
    click.echo(f"wrote {out}", err=True)
    return ExitCode.COMPLETED
