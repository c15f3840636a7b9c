"""Start one process a rank on this machine, pass on what signals say, and start again after a crash."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs
import click
import torch

from forge_core.checkpoint.store import CheckpointStore
from forge_core.distributed.launcher import LocalRanks
from forge_core.errors import INTERRUPTED, ConfigError, ExitCode
from forge_core.run.directory import RunDirectory
from forge_core.run.fatal import note_end, signal_words
from forge_core.run.process import hard_exit
from forge_core.run.signals import LAUNCH_FOLDER, SignalsForRanks, is_in_foreground, leave_file, stacks_file

__all__ = ["INTERRUPTED", "OUTCOME_FILE", "RANK_PROGRAM", "RunDirectory", "hard_exit", "launch", "leave_outcome"]
__all__ += ["launch_command", "processes_asked_for"]

OUTCOME_FILE = "FORGE_OUTCOME_FILE"
"""Environment variable that tells rank 0 where to leave its exit code: it may have ended because another one did, for a
reason of its own."""
_MOST_PER_CORE = 32
"""Processes on a core: each takes about 300 MB, and more than a few only try out a layout."""

_FINAL = (ExitCode.COMPLETED, ExitCode.INVALID, ExitCode.STOPPED, ExitCode.NON_FINITE)
"""Starting again would change nothing, or is not wanted."""


def processes_asked_for(nproc: str) -> int:
    """The number that ``--nproc`` means; ``auto`` is one a GPU, or one on a machine without.

    Raises:
        ConfigError: not a positive number or ``auto``, or more than this machine could start.
    """
    if nproc == "auto":
        return max(1, torch.cuda.device_count())
    if not nproc.isdecimal() or int(nproc) < 1:
        raise ConfigError(f"--nproc: expected a positive number or auto, got {nproc!r}")
    cores = os.cpu_count() or 1
    most = max(_MOST_PER_CORE * cores, torch.cuda.device_count())
    if int(nproc) > most:
        raise ConfigError(
            f"--nproc: {nproc} processes are more than the {cores} cores of this machine can serve; at most {most} "
            f"({_MOST_PER_CORE} a core)"
        )
    return int(nproc)


@attrs.frozen
class Ranks:
    """The processes to start."""

    number: int
    job_toml: str
    """The text of a resolved job; every process reads the same."""
    options: Sequence[str]
    """Further arguments of ``forge run``."""
    variables: Mapping[str, str]
    """More of the environment."""


def launch(ranks: Ranks, *, max_restarts: int, checkpoints: Path, until_the_end: ExitStack) -> int:
    """Run a job in processes on this machine, and end as they do.

    Args:
        max_restarts: start all processes again when one has crashed, so many times in a row without a new checkpoint.
        checkpoints: where those of the run are.
        until_the_end: signals are heeded until this is closed.

    Returns:
        An ``ExitCode``, or ``INTERRUPTED``.
    """
    in_vain = 0
    signals = until_the_end.enter_context(SignalsForRanks())
    while True:
        before = _newest(checkpoints)
        ended = _launch_once(ranks, signals)
        if ended.killed_by:
            note_end(checkpoints.parent, f"a rank was killed by {signal_words(ended.killed_by)}", ended.code)
        newest = _newest(checkpoints)
        if signals.leaves or ended.code in _FINAL:
            return ended.code
        if signals.stop is not None and (ended.before_it_listened or (max_restarts > 0 and not ended.failed_to_stop)):
            kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
            click.echo(f"{signals.stop.name}: stopped, and not started again; {kept}; the same command continues")
            return ExitCode.STOPPED
        if max_restarts == 0:
            return ended.code
        in_vain = 0 if newest != before else in_vain + 1
        if in_vain > max_restarts:
            click.echo(f"given up after {max_restarts} restarts in a row without a new checkpoint", err=True)
            return ended.code
        place, left = newest or "the beginning", max_restarts - in_vain
        click.echo(f"exit code {int(ended.code)}; started again from {place}, {left} more in vain", err=True)


def launch_command(arguments: Sequence[str], nproc: int, variables: Mapping[str, str], until_the_end: ExitStack) -> int:
    """Run a command of ``forge`` in so many processes on this machine, each a rank of one group, and end as they do.

    Args:
        arguments: the words behind ``forge``.
        variables: more of the environment.
        until_the_end: signals are heeded until this is closed.

    Returns:
        An ``ExitCode``, or ``INTERRUPTED``.
    """
    signals = until_the_end.enter_context(SignalsForRanks())
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        return _run_ranks(Path(folder), arguments, nproc, variables, signals).code


RANK_PROGRAM = ("-P", "-m", "forge_core")
"""The Python arguments of a rank; without the working folder among the sources of modules."""


@attrs.frozen
class _Ended:
    """How the ranks have ended."""

    code: int
    """The exit code of the run."""
    before_it_listened: bool = False
    """A rank was told to stop while it started: nothing had been trained yet."""
    killed_by: int = 0
    """The signal by which the rank ended that failed first, if it did not get it from here."""
    failed_to_stop: bool = False
    """It had been told to stop, and ended by an error: a last checkpoint that could not be written, perhaps."""


def _launch_once(asked: Ranks, signals: SignalsForRanks) -> _Ended:
    with tempfile.TemporaryDirectory(prefix="forge-") as name:
        job = Path(name) / "job.toml"
        job.write_text(asked.job_toml)
        return _run_ranks(Path(name), ["run", str(job), *asked.options], asked.number, asked.variables, signals)


def _run_ranks(
    folder: Path, arguments: Sequence[str], number: int, variables: Mapping[str, str], signals: SignalsForRanks
) -> _Ended:
    """Args:
    folder: where ranks leave how they have ended, and their stacks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    outcome, command = folder / "outcome", [sys.executable, *RANK_PROGRAM, *arguments]
    ranks = LocalRanks(command, number, {**variables, OUTCOME_FILE: str(outcome), LAUNCH_FOLDER: str(folder)})
    was_told = False
    while ranks.are_running() and not signals.leaves:
        if signals.stop is not None and not was_told:
            was_told = True
            ranks.tell(signals.stop)
            if signals.stop == signal.SIGINT and is_in_foreground():
                click.echo("Ctrl-C once more leaves at once", err=True)
        time.sleep(0.05)
    failed = ranks.first_failed()
    if not signals.leaves:
        ranks.end(lambda: signals.leaves)
    if signals.wants_stacks:
        ranks.leave(signal.SIGQUIT)
        _show_stacks(folder, number)
        return _Ended(ExitCode.UNEXPECTED)
    if signals.leaves:
        leave_file(folder).touch()
        ranks.leave(signal.SIGINT)
        return _Ended(INTERRUPTED)
    if failed is None:
        return _Ended(ExitCode.COMPLETED)
    rank, how = failed
    if signals.stop is not None and how in (-signals.stop, INTERRUPTED):  # all processes may have been told at once
        return _Ended(ExitCode.LOST_PEER, before_it_listened=True)
    code = _code_of(rank, how, ExitCode(int(outcome.read_text())) if outcome.exists() else None)
    return _Ended(code, killed_by=max(0, -how), failed_to_stop=was_told and code == ExitCode.UNEXPECTED)


def leave_outcome(code: int) -> None:
    """Called by rank 0 before it ends."""
    path = os.environ.get(OUTCOME_FILE)
    if path and os.environ.get("RANK") == "0":
        Path(path).write_text(str(int(code)))


def _newest(checkpoints: Path) -> str:
    """Its name; empty if there is none."""
    store = CheckpointStore(checkpoints)
    return store.folder(steps[-1]).name if (steps := store.steps()) else ""


def _code_of(rank: int, ended: int, own: ExitCode | None) -> ExitCode:
    """The code of rank 0 if it has a reason of its own, or of the rank that failed first if it is one of ours.

    Args:
        ended: as ``LocalRanks.first_failed`` says.
        own: what rank 0 has left.
    """
    if own not in (None, ExitCode.LOST_PEER):
        return own
    if ended in set(ExitCode):
        return ExitCode(ended)
    how = f"exit code {ended}" if ended > 0 else signal_words(-ended)
    click.echo(f"error: rank {rank} has ended by {how}", err=True)
    return ExitCode.LOST_PEER


def _show_stacks(folder: Path, nproc: int) -> None:
    for rank in range(nproc):
        path = stacks_file(folder, rank)
        stacks = path.read_text().rstrip() if path.exists() else ""
        click.echo(f"rank {rank}:\n{stacks or 'it had not begun, or did not react'}\n", err=True)
