"""``forge runs``: the runs in a folder, and one run as it goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import wrapped
from forge_core.config.describe import literal, printable, without_passwords
from forge_core.config.diff import leaves
from forge_core.contracts.command import Invocation
from forge_core.errors import ConfigError
from forge_plugins_monitor.origins import in_short
from forge_plugins_monitor.run_states.column import RunColumn
from forge_plugins_monitor.run_states.columns import cells_of, columns_of
from forge_plugins_monitor.run_states.effective_time import EffectiveTime, effective_time, in_words
from forge_plugins_monitor.run_states.progress import RunProgress, can_read, job_of, progress_of, tail
from forge_plugins_monitor.run_states.table import print_table

_LOOK_EVERY = 0.5
"""Seconds."""
_OF_THEIR_OWN = ("run.name", "run.dir")
"""Keys that differ between any two runs."""


@attrs.frozen(kw_only=True)
class Listed:
    """A run in the list."""

    progress: RunProgress
    cells: Mapping[str, Mapping[str, Any]]
    """What columns say, by their titles."""
    differing: Mapping[str, Any]
    """The keys of its job that not all runs of the list have with one value."""


@attrs.frozen(kw_only=True)
class ToldRun(RunProgress):
    """A run of the list, with what distinguishes it."""

    columns: Mapping[str, Mapping[str, Any]]
    """What plugins say of it, by their columns; ``text`` is what the table has."""
    differing: Mapping[str, Any]
    """Keys of its job that not all runs of the list have with one value; ``run.name`` and ``run.dir`` left out."""
    effective_time: EffectiveTime | None
    """Of a run that was asked for alone; null where its files do not tell it."""


@click.command()
@click.argument("folder", metavar="[DIR]", default="runs", type=click.Path(path_type=Path))
@click.option("-f", "--follow", is_flag=True, help="Print the lines of the run in DIR as they come, until it ends.")
@json_option(list[ToldRun], says="Print JSON; with -f, the lines of metrics.")
@click.pass_obj
def runs(obj: Invocation, folder: Path, follow: bool, as_json: bool) -> None:
    """Show the runs in DIR (by default runs/), or the one run whose directory it is.

    Of several runs, it also says which keys of their jobs differ; of one, how much of its time it has trained for good.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such directory; name the run.dir of the runs, or one run's directory")
    columns = columns_of(obj.catalog())
    found = _jobs_in(folder, columns)
    if follow:
        if list(found) != [folder]:
            raise ConfigError(f"-f: {folder} is not the directory of one run")
        _follow(folder, "metrics.jsonl" if as_json else "log.txt")
        return
    listed = _listed(found, columns)
    told = [effective_time(one.progress.path, one.progress) for one in listed if one.progress.path == folder]
    if as_json:
        print_json([_told(one, told[0] if told else None) for one in listed])
    elif listed:
        print_table([_cells(one) for one in listed])
        for line in filter(None, told):
            click.echo(wrapped(in_words(line)))
    else:
        click.echo(f"there are no runs in {folder}")


def _jobs_in(folder: Path, columns: Sequence[RunColumn]) -> dict[Path, Mapping[str, Any]]:
    """The jobs of the runs in a folder, or of the run whose directory it is, by directory."""

    def file_of(run: Path) -> Path | None:
        if can_read(run / "job.toml"):
            return run / "job.toml"
        return next((file for column in columns if (file := column.job_file(run)) is not None), None)

    own = file_of(folder)
    if own is not None:
        return {folder: job_of(own)}
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    return {run: job_of(file) for run in folders if (file := file_of(run)) is not None}


def _listed(found: Mapping[Path, Mapping[str, Any]], columns: Sequence[RunColumn]) -> list[Listed]:
    cells = cells_of(columns, [*found])
    flat = {run: dict(leaves(job)) for run, job in found.items()}
    keys = dict.fromkeys(key for job in flat.values() for key in job if key not in _OF_THEIR_OWN)
    differing = [key for key in keys if len({literal(job.get(key, "")) for job in flat.values()}) > 1]
    listed = []
    for run, job in found.items():
        own = {title: told[run] for title, told in cells.items() if run in told}
        known = next((cell["state"] for cell in own.values() if cell.get("state")), None)
        has = {key: flat[run][key] for key in differing if key in flat[run]}
        listed.append(Listed(progress=progress_of(run, job, known), cells=own, differing=has))
    return listed


def _told(one: Listed, time: EffectiveTime | None) -> ToldRun:
    """For programs."""
    return ToldRun(
        **attrs.asdict(one.progress, recurse=False),
        columns={title.lower(): cell for title, cell in one.cells.items()},
        differing=one.differing,
        effective_time=time,
    )


def _cells(one: Listed) -> dict[str, str]:
    """For people."""
    run = one.progress
    cells = {
        "RUN": run.name,
        "STATE": run.state,
        "STEP": f"{run.step}/{'?' if run.steps is None else run.steps}",
        "LOSS": "" if run.loss is None else f"{run.loss:.4f}",
        "BEST": "" if run.best is None else f"{run.best:.4f}",
        "SAVED": "" if run.checkpoint is None else str(run.checkpoint),
        "LAST SEEN": "" if run.age is None else _duration(run.age),
        **{title: cell["text"] for title, cell in one.cells.items()},
        "DIFFERS IN": ", ".join(f"{key}={in_short(value)}" for key, value in one.differing.items()),
    }
    return {title: printable(without_passwords(text)) for title, text in cells.items()}


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _follow(run: Path, name: str) -> None:
    """Until no run trains there any more."""
    file = run / name
    for line in tail(file)[-20:]:
        click.echo(printable(line))
    at = file.stat().st_size if file.is_file() else 0
    while True:
        state = progress_of(run, job_of(run / "job.toml")).state  # asked before the last lines are read
        at = _print_from(file, at)
        if state in _ENDED:
            click.echo(f"{run} {_ENDED[state]}", err=True)
            return
        time.sleep(_LOOK_EVERY)


_ENDED = {
    "finished": "has reached its end",
    "stopped": "was stopped, and has saved",
    "failed": "has failed; forge explain says why",
}


def _print_from(file: Path, at: int) -> int:
    """Print the whole lines behind a place in a file, and return the place behind them. A run that goes back to a
    checkpoint takes lines of metrics back; what it writes then stands where they stood."""
    if not file.is_file():
        return 0
    with file.open("rb") as opened:
        at = min(at, file.stat().st_size)
        opened.seek(at)
        lines, newline, _ = opened.read().rpartition(b"\n")
    for line in lines.decode(errors="replace").splitlines():
        click.echo(printable(line))
    return at + len(lines) + len(newline)
