"""``forge explain``: why a run stopped, and what to type next."""

from __future__ import annotations

from pathlib import Path

import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import wrapped
from forge_core.config.describe import printable, without_passwords
from forge_core.contracts.command import Invocation
from forge_core.errors import ConfigError, nearest
from forge_plugins_monitor.run_states.columns import columns_of, states
from forge_plugins_monitor.run_states.explanation import Explanation, in_words
from forge_plugins_monitor.run_states.explanation import explain as explained
from forge_plugins_monitor.run_states.progress import can_read


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option(Explanation)
@click.pass_obj
def explain(obj: Invocation, run: Path, as_json: bool) -> None:
    """Say why the run in RUN stopped, what it has lost, and which command to type next.

    Nothing is written. A run that is running says so. Exit codes: 0 explained, 2 RUN is no run's directory.
    """
    columns = columns_of(obj.catalog())
    if not any(can_read(run / name) for name in ("job.toml", "events.jsonl")) and not any(
        column.job_file(run) for column in columns
    ):
        raise ConfigError(f"RUN: {run} is not a run's directory: {_why_not(run)}")
    told = explained(run, states(columns, [run]).get(run))
    if as_json:
        print_json(told)
    else:
        lines = printable(without_passwords(in_words(told))).splitlines()
        click.echo("\n".join([*map(wrapped, lines[:-1]), lines[-1]]))  # the last one is to be copied


def _why_not(run: Path) -> str:
    if run.is_dir():
        return "there is no job.toml in it that can be read"
    near = (
        nearest(run.name, (path.name for path in run.parent.glob("*") if path.is_dir()))
        if run.parent.is_dir()
        else None
    )
    return "there is no such directory" + (f"; did you mean {run.parent / near}?" if near else "")
