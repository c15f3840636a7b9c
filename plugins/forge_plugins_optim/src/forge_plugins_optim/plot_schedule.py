"""``forge plot-schedule``: the learning rate of a job over its steps, in the terminal or as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.command import Invocation, options_of
from forge_core.errors import ConfigError
from forge_core.job import catalog_of, load_job, resolve_degrees
from forge_plugins_optim.terminal_chart import terminal_chart

_DRAWN = 1000
"""Steps of a picture, at most, besides the last one."""


@attrs.frozen(kw_only=True)
class Multiplied:
    """A step of a schedule."""

    step: int
    """Counts from 1."""
    multiplier: float
    """Of the learning rate."""
    learning_rate: float | None
    """Null if the optimizer has none for all parameters."""


@attrs.frozen(kw_only=True)
class ToldSchedule:
    """The schedule of a job."""

    scheduler: str
    """The component's name."""
    steps: int
    tokens_per_step: int
    """Of all ranks."""
    values: Sequence[Multiplied]
    """As many steps as ``--width`` says, from the first to the last one."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks of the run, for a warm-up in tokens; by default as few as the job allows.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture (.png, .svg, .pdf).")
@click.option("--width", type=click.IntRange(10, 1000), default=64, show_default=True, help="Columns of the chart.")
@click.option("--height", type=click.IntRange(2, 200), default=12, show_default=True, help="Lines of the chart.")
@json_option(ToldSchedule)
@click.pass_obj
def plot_schedule(
    obj: Invocation,
    config: Path,
    overrides: tuple[str, ...],
    world_size: int | None,
    out: Path | None,
    width: int,
    height: int,
    as_json: bool,
) -> None:
    """Draw what the schedule of the job in CONFIG multiplies the learning rate by, at each step of the run.

    OVERRIDES are --section.key=value, section.key=value or --section.key value.

    Exit codes: 0 drawn, 2 the job is wrong or the picture cannot be written.
    """
    job = load_job(config, overrides, catalog=obj.catalog, world_size=world_size, options=options_of(plot_schedule))
    build = ComponentBuilder(catalog_of(job, obj.catalog))
    total, tokens = job.train.steps, _tokens_per_step(job, world_size)
    multiplier = build(job.scheduler, total_steps=total, tokens_per_step=tokens)
    if out is not None:
        _draw(out, job, multiplier)
        click.echo(f"{out}: {job.scheduler.name} over {total} steps", err=as_json)
    columns, rate = _spread(total, width), getattr(job.optimizer.config, "lr", None)
    if as_json:
        values = [_multiplied(step, multiplier(step), rate) for step in columns]
        told = ToldSchedule(scheduler=job.scheduler.name, steps=total, tokens_per_step=tokens, values=values)
        print_json(told)
    if out is not None or as_json:
        return
    click.echo(f"{job.scheduler.name}: multiplier of the learning rate, update by update")
    for line in terminal_chart([multiplier(step) for step in columns], height, first=1, last=total):
        click.echo(line)
    for word, step in (("first", 1), ("last", total)):
        value = multiplier(step)
        of_base = f", learning rate {value * rate:.4g}" if isinstance(rate, float) else ""
        click.echo(f"{word} update: {value:.4g}{of_base}")
    click.echo(f"tokens: {tokens} a step, {tokens * total:.4g} in all")


def _multiplied(step: int, multiplier: float, rate: object) -> Multiplied:
    of_base = multiplier * rate if isinstance(rate, float) else None
    return Multiplied(step=step, multiplier=multiplier, learning_rate=of_base)


def _tokens_per_step(job: Job, world_size: int | None) -> int:
    train, parallel = job.train, job.parallel
    if train.global_batch_size is not None:
        return train.global_batch_size * train.seq_len
    if world_size is None:
        ranks = parallel.dp_replicate * max(1, parallel.dp_shard)
    else:
        degrees = resolve_degrees(parallel, world_size)
        ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    return train.batch_size * (train.grad_accumulation or 1) * ranks * train.seq_len


def _spread(total_steps: int, n: int) -> list[int]:
    """``n`` steps from the first to the last one."""
    return [1 + round(index * (total_steps - 1) / (n - 1)) for index in range(n)]


def _draw(out: Path, job: Job, multiplier: Callable[[int], float]) -> None:
    """
    Raises:
        ConfigError: matplotlib is not there, does not know the file's format, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--out needs matplotlib, which is not installed: pip install 'forge-plugins-optim[plot]'. Without --out, "
            "the schedule is drawn in the terminal."
        ) from error
    total = job.train.steps
    steps = range(1, total + 1) if total <= _DRAWN else _spread(total, _DRAWN)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(steps, [multiplier(step) for step in steps], drawstyle="steps-pre")
    axes.set(xlabel="step", ylabel="multiplier of the learning rate", title=job.scheduler.name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(out, dpi=150)
    except ValueError as error:  # another ending
        raise ConfigError(f"--out {out}: {str(error)[:1].lower()}{str(error)[1:]}") from error
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from error
