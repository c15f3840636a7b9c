"""``forge status``: the runs in a folder, and what their Slurm jobs do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from forge_core.config.describe import printable
from forge_core.errors import ConfigError
from forge_plugins_slurm.effective_time import effective_time, in_words
from forge_plugins_slurm.job_record import last_job
from forge_plugins_slurm.queue import queued_jobs
from forge_plugins_slurm.run_progress import RunProgress, progress_of, runs_in


@click.command()
@click.argument("folder", metavar="[DIR]", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(folder: Path, as_json: bool) -> None:
    """Show the runs in DIR (by default runs/), or the one run whose directory it is.

    Of one run, it also says how much of its time it has trained for good.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such directory; name the run.dir of the runs, or one run's directory")
    jobs = {run: last_job(run) for run in runs_in(folder)}
    queue = queued_jobs([job.job_id for job in jobs.values() if job is not None])
    if queue is None:
        click.echo("note: Slurm does not answer, so that what is queued is not known", err=True)
    found = [progress_of(run, job, queue or {}) for run, job in jobs.items()]
    told = [effective_time(one.path, one) for one in found if one.path == folder]
    if as_json:
        rows = [{**attrs.asdict(one), "path": str(one.path)} for one in found]
        if told:
            rows[0]["effective_time"] = attrs.asdict(told[0]) if told[0] else None
        click.echo(json.dumps(rows, indent=2))
    elif found:
        _print_table(found)
        for one in filter(None, told):
            click.echo(in_words(one))
    else:
        click.echo(f"there are no runs in {folder}")


def _print_table(runs: Sequence[RunProgress]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("RUN", overflow="fold")
    table.add_column("STATE")
    for title in ("STEP", "LOSS", "SAVED"):
        table.add_column(title, justify="right")
    table.add_column("JOB")
    table.add_column("LAST SEEN", justify="right")
    narrow = Table(box=None, pad_edge=False, header_style="bold")
    narrow.add_column("RUN", overflow="fold")
    narrow.add_column("STATE", no_wrap=True)
    narrow.add_column("STEP", justify="right", no_wrap=True)
    for run in runs:
        job = printable(" ".join(filter(None, (run.job_id, run.reason))))
        name = Text(printable(run.name))
        state = Text(run.state, style=_STYLES.get(run.state, ""))
        step = f"{run.step}/{'?' if run.steps is None else run.steps}"
        loss = "-" if run.loss is None else f"{run.loss:.4f}"
        saved = "-" if run.checkpoint is None else str(run.checkpoint)
        seen = "-" if run.age is None else _duration(run.age)
        table.add_row(name, state, step, loss, saved, Text(job or "-"), seen)
        narrow.add_row(name, state, step)
        narrow.add_row(f"  loss {loss}", f"saved {saved}", seen)
        if job:
            narrow.add_row(Text(f"  job {job}"))
    console = Console()
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    console.print(table if needed <= console.width else narrow)


_STYLES = {"running": "green", "failed": "red", "queued": "yellow", "finished": "dim"}


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
