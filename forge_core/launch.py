"""Start one process a rank on this machine, with torch's own elastic launcher."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from forge_core.errors import ConfigError, ExitCode

OUTCOME_FILE = "FORGE_OUTCOME_FILE"
"""Environment variable that tells the first rank where to leave its exit code: the launcher that passes on a signal
does not report those of the processes it ended."""


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


def launch(job_toml: str, nproc: int, options: Sequence[str]) -> ExitCode:
    """Run a resolved job in ``nproc`` processes, and end as they do.

    Args:
        job_toml: the job's text; every process reads the same.
        options: further arguments of ``forge run``.
    """
    # its own reports repeat what our processes have said, with tracebacks of the launcher
    logging.disable(logging.ERROR)
    # a rank that was asked to save and stop may need longer than the 30 s that torch gives it before it kills
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        job = Path(folder) / "job.toml"
        job.write_text(job_toml)
        outcome = Path(folder) / "outcome"
        os.environ[OUTCOME_FILE] = str(outcome)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            run_id=str(os.getpid()),
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "forge_core", "run", str(job), *options)
        except ChildFailedError as error:
            return _read(outcome) or _code_of(error)
        except SignalException:
            return _read(outcome) or ExitCode.UNEXPECTED
        return ExitCode.COMPLETED


def leave_outcome(code: ExitCode) -> None:
    """Called by the first rank before it ends."""
    path = os.environ.get(OUTCOME_FILE)
    if path and os.environ.get("RANK") == "0":
        Path(path).write_text(str(int(code)))


def _read(outcome: Path) -> ExitCode | None:
    return ExitCode(int(outcome.read_text())) if outcome.exists() else None


def _code_of(error: ChildFailedError) -> ExitCode:
    """That of the process which failed first, if it is one of ours; a signal's is not."""
    _, first = error.get_first_failure()
    return ExitCode(first.exitcode) if first.exitcode in set(ExitCode) else ExitCode.LOST_PEER
