"""Start one process a rank on this machine, with torch's own elastic launcher."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from forge_core.checkpoint.store import CheckpointStore
from forge_core.engine.orphan import LAUNCHER
from forge_core.errors import ConfigError, ExitCode

OUTCOME_FILE = "FORGE_OUTCOME_FILE"
"""Environment variable that tells the first rank where to leave its exit code: the launcher that passes on a signal
does not report those of the processes it ended."""


_FINAL = (ExitCode.COMPLETED, ExitCode.INVALID, ExitCode.STOPPED, ExitCode.NON_FINITE)
"""Starting again would change nothing, or is not wanted."""


def processes_asked_for(nproc: str) -> int:
    """The number that ``--nproc`` means; ``auto`` is one a GPU, or one on a machine without.

    Raises:
        ConfigError: not a positive number or ``auto``.
    """
    if nproc == "auto":
        return max(1, torch.cuda.device_count())
    if not nproc.isdecimal() or int(nproc) < 1:
        raise ConfigError(f"--nproc: expected a positive number or auto, got {nproc!r}")
    return int(nproc)


def launch(job_toml: str, nproc: int, options: Sequence[str], *, max_restarts: int, checkpoints: Path) -> ExitCode:
    """Run a resolved job in ``nproc`` processes, and end as they do.

    Args:
        job_toml: the job's text; every process reads the same.
        options: further arguments of ``forge run``.
        max_restarts: start all processes again when one has crashed, so many times in a row without a new checkpoint.
        checkpoints: where those of the run are.
    """
    # its own reports repeat what our processes have said, with tracebacks of the launcher
    logging.disable(logging.ERROR)
    # a rank that was asked to save and stop may need longer than the 30 s that torch gives it before it kills
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    in_vain = 0
    while True:
        before = _newest(checkpoints)
        code, was_signalled = _launch_once(job_toml, nproc, options)
        if was_signalled or code in _FINAL or max_restarts == 0:
            return code
        newest = _newest(checkpoints)
        in_vain = 0 if newest != before else in_vain + 1
        if in_vain > max_restarts:
            click.echo(f"given up after {max_restarts} restarts in a row without a new checkpoint", err=True)
            return code
        place = newest or "the beginning"
        click.echo(f"exit code {code}; started again from {place}, {max_restarts - in_vain} more in vain", err=True)


def _launch_once(job_toml: str, nproc: int, options: Sequence[str]) -> tuple[ExitCode, bool]:
    """Returns also whether a signal has ended it."""
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        job = Path(folder) / "job.toml"
        job.write_text(job_toml)
        outcome = Path(folder) / "outcome"
        os.environ[OUTCOME_FILE] = str(outcome)
        os.environ[LAUNCHER] = str(os.getpid())
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            run_id=str(os.getpid()),
            max_restarts=0,  # torch would count those that made progress
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:  # it clears up after itself: a launcher may be called from a process that goes on
            elastic_launch(config, sys.executable)("-m", "forge_core", "run", str(job), *options)
        except ChildFailedError as error:
            own = _read(outcome)
            # the first rank may have ended because another one did, for a reason of its own
            return (_code_of(error) if own in (None, ExitCode.LOST_PEER) else own), False
        except SignalException:
            return _read(outcome) or ExitCode.UNEXPECTED, True
        finally:
            del os.environ[OUTCOME_FILE], os.environ[LAUNCHER]
        return ExitCode.COMPLETED, False


def leave_outcome(code: ExitCode) -> None:
    """Called by the first rank before it ends."""
    path = os.environ.get(OUTCOME_FILE)
    if path and os.environ.get("RANK") == "0":
        Path(path).write_text(str(int(code)))


def _newest(checkpoints: Path) -> str:
    """Its name; empty if there is none."""
    store = CheckpointStore(checkpoints)
    return store.folder(steps[-1]).name if (steps := store.steps()) else ""


def _read(outcome: Path) -> ExitCode | None:
    return ExitCode(int(outcome.read_text())) if outcome.exists() else None


def _code_of(error: ChildFailedError) -> ExitCode:
    """That of the process which failed first, if it is one of ours; a signal's is not."""
    _, first = error.get_first_failure()
    return ExitCode(first.exitcode) if first.exitcode in set(ExitCode) else ExitCode.LOST_PEER
