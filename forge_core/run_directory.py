"""The files of one run: ``<run.dir>/<run.name>/``."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from forge_core.config.job import dump_job
from forge_core.config.sections import Job
from forge_core.errors import ConfigError


class RunDirectory:
    """Written by the first rank only; other ranks know the paths.

    ``job.toml`` (resolved, loadable by ``forge run``), ``environment.json``, ``metrics.jsonl``, ``log.txt``,
    ``checkpoints/``.
    """

    def __init__(self, job: Job, *, writes: bool) -> None:
        self.path = job.run.dir.expanduser() / str(job.run.name)
        self.checkpoints = self.path / "checkpoints"
        self._writes = writes
        self._metrics: IO[str] | None = None
        self._log: IO[str] | None = None
        self._said_before: list[str] = []

    def refuse_if_unwritable(self) -> None:
        """Check without writing anything.

        Raises:
            ConfigError: neither the directory nor the nearest one above it that exists can be written to.
        """
        if len(self.path.name.encode()) > 200:
            raise ConfigError(f"run.name: {len(self.path.name)} characters are too many for a directory's name")
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise ConfigError(f"run.dir: {self.path} cannot be a directory, because {place} is a file")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(f"run.dir: no permission to write in {place}; choose another run.dir")

    def open(self, job: Job, environment: Mapping[str, Any], resumed_step: int) -> None:
        """Create the directory, or take it up again after ``resumed_step``.

        Lines of ``metrics.jsonl`` about later steps belong to work that was lost with the process that did it; they are
        taken out, so that the file tells one history.

        Raises:
            ConfigError: the directory cannot be written to after all.
        """
        if not self._writes:
            return
        try:
            self._open(job, environment, resumed_step)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot write {error.filename or self.path}: {error.strerror}") from error

    def _open(self, job: Job, environment: Mapping[str, Any], resumed_step: int) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._log = (self.path / "log.txt").open("a", buffering=1)
        self._refuse_if_in_use(self._log)
        for line in self._said_before:
            self.write_log(line)
        _write(self.path / "job.toml", dump_job(job))
        _write(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            kept = [line for line in metrics.read_text().splitlines() if _step_of(line) <= resumed_step]
            _write(metrics, "".join(line + "\n" for line in kept))
        self._metrics = metrics.open("a", buffering=1)

    def _refuse_if_in_use(self, log: IO[str]) -> None:
        """The lock goes with the process, however that ends."""
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            self._log = None
            raise ConfigError(
                f"another process is training in {self.path}; stop it, or choose another run.name"
            ) from None

    def write_metrics(self, values: Mapping[str, float]) -> None:
        """One line. A value that is not finite becomes null: JSON has no word for it."""
        if self._metrics is not None:
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            self._metrics.write(json.dumps(finite) + "\n")

    def write_log(self, line: str) -> None:
        """What is said before the directory is opened is written when it is."""
        if self._log is not None:
            self._log.write(line + "\n")
        elif self._writes:
            self._said_before.append(line)

    def close(self) -> None:
        for file in (self._metrics, self._log):
            if file is not None:
                file.close()
        self._metrics = self._log = None


def describe_environment(plugins: Mapping[str, str], mesh: Mapping[str, int], device: str) -> dict[str, Any]:
    """What decided the numbers besides the job: versions, machine, mesh."""
    names = ("forge-core", "torch", "numpy")
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "plugins": dict(plugins),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "device": device,
        "world_size": _product(mesh),
        "mesh": dict(mesh),
    }


def _product(mesh: Mapping[str, int]) -> int:
    size = 1
    for degree in mesh.values():
        size *= degree
    return size


def _step_of(line: str) -> float:
    """The step of a line of metrics; a line cut short by a crash counts as after everything."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _write(path: Path, text: str) -> None:
    """Replace a file in one go."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
