"""The files of one run: ``<run.dir>/<run.name>/``."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forge_core.checkpoint.fsync import flush, make_folder, write_durably
from forge_core.config.sections import Job
from forge_core.errors import ConfigError
from forge_core.job import dump_job
from forge_core.run.line_file import LineFile

ENDS = ("completed", "preempted", "stopped", "failed")
"""Events with one of which every start ends that is not killed."""

BETWEEN_STARTS = "-" * 80
"""In ``log.txt``, where a run was started again."""


class RunDirectory:
    """Written by rank 0 only; other ranks know the paths.

    ``job.toml`` (resolved, loadable by ``forge run``), ``environment.json``, ``metrics.jsonl``, ``log.txt``,
    ``events.jsonl``, ``lease.json`` while it runs, ``checkpoints/``.
    """

    def __init__(self, job: Job, *, writes: bool) -> None:
        self.path = job.run.dir.expanduser() / str(job.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.job_file = self.path / "job.toml"
        """The job of the last start."""
        self._writes = writes
        self._files: dict[str, LineFile] = {}
        """Those of lines that are open: metrics.jsonl, events.jsonl, log.txt."""
        self._said_before: list[str] = []
        self._complained_of: set[LineFile] = set()

    def last_job(self) -> str | None:
        """The text of ``job_file``, if there is one."""
        try:
            return self.job_file.read_text()
        except (OSError, ValueError):
            return None

    def refuse_if_unwritable(self) -> None:
        """Check without writing anything.

        Raises:
            ConfigError: neither the directory nor the nearest one above it that exists can be written to.
        """
        folder = next(one for one in (self.path, *self.path.parents) if one.exists())
        if not folder.is_dir():
            raise ConfigError(f"run.dir: {self.path} cannot be a directory, because {folder} is a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"run.dir: no permission to write in {folder}; choose another run.dir")
        if folder == self.path and os.geteuid() not in (0, owner := folder.stat().st_uid):
            raise ConfigError(
                f"run.dir: {folder} belongs to another user (number {owner}), who could put other files in the "
                "place of this run's; choose another run.dir or run.name"
            )

    def open(self, job: Job, environment: Mapping[str, Any], resumed_step: int) -> None:
        """Create the directory, or take it up again after ``resumed_step``. Rank 0 alone calls it.

        Lines of ``metrics.jsonl`` about later steps belong to work that was lost with the process that did it; they are
        taken out, so that the file tells one history.

        Raises:
            ConfigError: the directory cannot be written to after all.
        """
        try:
            make_folder(self.checkpoints)
            for name in ("log.txt", "events.jsonl"):
                self._files[name] = LineFile(self.path / name)
            if (self.path / "log.txt").stat().st_size:
                self._append("log.txt", BETWEEN_STARTS)
            for line in self._said_before:
                self._append("log.txt", line)
            write_durably(self.job_file, dump_job(job))
            write_durably(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")
            self.forget_after(resumed_step)
            flush(self.path)  # from here on, a power cut leaves nothing that says less than this
        except OSError as error:
            raise ConfigError(f"run.dir: cannot write {error.filename or self.path}: {error.strerror}") from error

    def forget_after(self, step: int) -> None:
        """Take the lines about later steps out of ``metrics.jsonl``: that work is being done again."""
        if (before := self._files.get("metrics.jsonl")) is not None:
            before.sync()
            before.close()
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            write_durably(metrics, self._until(step, metrics))
        self._files["metrics.jsonl"] = LineFile(metrics)

    def _until(self, step: int, metrics: Path) -> Iterator[str]:
        """The lines up to ``step``, one at a time: a long run has millions. Others are put aside once all are read, but
        for a last one that a crash has cut short."""
        odd = []
        with metrics.open("rb") as lines:
            for line in lines:
                if (of := _step_of(line)) is None:
                    odd += [line[:-1]] if line.endswith(b"\n") and line != b"\n" else []
                elif of <= step:
                    yield line.decode().removesuffix("\n") + "\n"
        if odd:
            self._set_aside(metrics, odd)

    def _set_aside(self, file: Path, odd: Sequence[bytes]) -> None:
        """Move lines that are none of ours into a file beside, so that people can read them."""
        aside = LineFile(file.with_name(f"{file.name}.aside"))
        for line in odd:
            aside.append(line.decode(errors="backslashreplace"))
        aside.close()
        sentence = f"{len(odd)} of the lines of {file} are no metrics; they are in {file}.aside now"
        print(sentence, file=sys.stderr)
        self.write_log(sentence)

    def sync(self) -> None:
        """Make all written so far survive a power cut. A disk that does not take it is complained about, and no
        reason to go without a checkpoint."""
        for file in self._files.values():
            try:
                file.sync()
            except OSError as error:
                self._complain(file, error)

    def write_metrics(self, values: Mapping[str, float]) -> None:
        """One line. A value that is not finite becomes null: JSON has no word for it."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._append("metrics.jsonl", json.dumps(finite))

    def write_log(self, line: str) -> None:
        """With the local time. What is said before the directory is opened is written when it is."""
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")  # as people's clocks show it
        line = "\n".join(f"{now}  {part}" for part in line.split("\n"))
        if self._writes and "log.txt" not in self._files:
            self._said_before.append(line)
        self._append("log.txt", line)

    def write_event(self, event: str, **facts: Any) -> None:
        """One line of ``events.jsonl``, where those of all attempts stay: when, what, and more about it."""
        self._append("events.jsonl", event_line(event, **facts))

    def events(self) -> list[dict[str, Any]]:
        """The events of all attempts so far, on rank 0."""
        try:
            lines = (self.path / "events.jsonl").read_text(errors="replace").splitlines() if self._writes else []
        except OSError:
            return []
        return [event for event in map(_event_of, lines) if event is not None]

    def write_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        """A JSON file of its own."""
        if self._writes:
            write_durably(self.path / name, json.dumps(facts, indent=1) + "\n")

    def close(self) -> None:
        files, self._files = self._files, {}
        if missing := {name: n for name, file in files.items() if (n := file.close())}:
            counted = ", ".join(f"{n} of {name}" for name, n in missing.items())
            print(f"lines are missing in {self.path}, which could not be written: {counted}", file=sys.stderr)

    def _append(self, name: str, line: str) -> None:
        """To a file that is open. A disk that is full must not end a run that could go on."""
        if (file := self._files.get(name)) is None:
            return
        try:
            file.append(line)
            self._complained_of.discard(file)
        except OSError as error:
            self._complain(file, error)

    def _complain(self, file: LineFile, error: OSError) -> None:
        """Once, until it works again."""
        if file not in self._complained_of:
            self._complained_of.add(file)
            kept = "lines are kept in memory until it works again"
            print(f"cannot write to {file.path}: {error.strerror}; {kept}", file=sys.stderr)


def event_line(event: str, **facts: Any) -> str:
    """A line of ``events.jsonl``, of now."""
    return json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts})


def describe_environment(
    plugins: Mapping[str, str], mesh: Mapping[str, int], device: str, command: str | None
) -> dict[str, Any]:
    """Facts that decide the numbers besides the job: command, commit of the working folder, versions, machine, mesh."""
    import torch  # its own version names the CUDA that it is built for

    return {
        "command": command,
        "commit": git_commit(Path.cwd()),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, **{name: version(name) for name in ("forge-core", "numpy")}},
        "plugins": dict(plugins),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "device": device,
        "world_size": math.prod(mesh.values()),
        "mesh": dict(mesh),
    }


def _step_of(line: bytes) -> float | None:
    """The step of a line of metrics; ``None`` if it is none."""
    try:
        return float(json.loads(line.decode())["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _event_of(line: str) -> dict[str, Any] | None:
    """``None`` for a line that a crash has cut short, or that is no event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    needed = {"saved": "seconds", "mirrored": "seconds", "stopping": "lead"}.get(event["event"])
    return event if needed is None or isinstance(event.get(needed), (int, float)) else None


_PATIENCE = 5.0
"""Seconds: a checkout on a slow disk must not hold a run up."""
_ASK = ("git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def git_commit(folder: Path) -> str | None:
    """Its hash, with ``-dirty`` if tracked files differ from it; ``None`` if there is no checkout, commit or git."""
    try:
        said = subprocess.run(_ASK, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
