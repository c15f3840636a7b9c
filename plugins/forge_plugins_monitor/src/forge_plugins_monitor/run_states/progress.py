"""How far a run is, read from its directory while it may be running; nothing is written and nothing is locked."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import attrs

from forge_core.config.toml_file import read_document
from forge_core.distributed.process_identity import Process
from forge_core.errors import ConfigError
from forge_core.run.fatal import SIGNAL_WORDS

ALIVE = 30.0
"""Seconds after a sign of life during which a run that is in no cluster's queue counts as running."""


@attrs.frozen(kw_only=True)
class RunProgress:
    """One run."""

    name: str
    path: Path
    state: str
    """``queued``, ``running``, ``finished``, ``stopped`` (saved, and continued by the same command), ``failed``, or
    ``prepared`` (never started)."""
    step: int
    """The last one that its files tell of: metrics, checkpoints, or events."""
    steps: int | None
    loss: float | None
    """Nats a token, of the last logged step."""
    step_seconds: float | None
    """Of the last logged step."""
    checkpoint: int | None
    """Step of the newest checkpoint."""
    best: float | None
    """The best evaluation, by ``checkpoint.best_metric`` and ``best_is`` of the job."""
    reason: str
    """What has killed the run, or what it waits for."""
    age: float | None
    """Seconds since the run has last written something."""


def progress_of(run: Path, job: Mapping[str, Any], known: str | None = None) -> RunProgress:
    """How far a run is.

    Args:
        job: its resolved job, as far as it can be read.
        known: ``"queued"`` or ``"running"``, if somebody knows it better than the files of the run.
    """
    steps = _number(job, "train", "steps")
    logged = _last_logged(run)
    checkpoint = max(checkpoint_steps(run), default=None)
    age = _age(run)
    events = events_of_last_start(run)
    state = known or _state(run, events, age, is_complete=steps is not None and checkpoint == steps)
    killed = killed_by(run) if state == "failed" else None
    return RunProgress(
        name=run.absolute().name,  # "." has none
        path=run,
        state=state,
        step=_last_step(events, logged, checkpoint),
        steps=steps,
        loss=logged.get("loss"),
        step_seconds=logged.get("step_seconds"),
        best=_best(run, job),
        checkpoint=checkpoint,
        reason=f"killed by {killed}" if killed else "",
        age=age,
    )


def killed_by(run: Path) -> str | None:
    """The signal that has killed the last start of a run, as far as its processes could leave that behind."""
    for path in sorted(run.glob("stacks/fatal_rank_*.txt")):
        try:
            with path.open("rb") as file:
                first = file.readline(200).decode(errors="replace")
        except OSError:
            continue
        if found := next((words for name, words in SIGNAL_WORDS.items() if name in first), None):
            return found
    return None


def job_of(file: Path) -> Mapping[str, Any]:
    """A resolved job; an empty one if it cannot be read."""
    try:
        return read_document(file).table
    except ConfigError:
        return {}


def checkpoint_steps(run: Path) -> Iterator[int]:
    """The steps of the committed checkpoints; a folder has this name only once it is whole."""
    for manifest in run.glob("checkpoints/step_*/manifest.json"):
        digits = manifest.parent.name.removeprefix("step_")
        if digits.isdecimal():
            yield int(digits)


def _state(run: Path, events: Sequence[Mapping[str, Any]], age: float | None, *, is_complete: bool) -> str:
    if is_complete:
        return "finished"
    if age is None:
        return "prepared"
    ended = events[-1]["event"] if events else ""
    if ended == "completed":  # its checkpoints may be gone
        return "finished"
    if ended in ("stopped", "preempted"):
        return "stopped"
    if ended == "failed":
        return "failed"
    holder = holder_of(run)
    is_alive = holder.is_running if holder is not None and holder.is_here else age < ALIVE
    return "running" if is_alive else "failed"


def holder_of(run: Path) -> Process | None:
    """The process that trains there, or has been killed as it did; only while ``lease.json`` is there."""
    try:
        lease = json.loads((run / "lease.json").read_text(encoding="utf-8"))
        return Process(lease["machine"], lease["process"], lease["started"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _number(job: Mapping[str, Any], section: str, key: str) -> int | None:
    value = job[section].get(key) if isinstance(job.get(section), Mapping) else None
    return value if type(value) is int else None


def _best(run: Path, job: Mapping[str, Any]) -> float | None:
    """Of all lines of the metrics that are about an evaluation, which are few."""
    section = job.get("checkpoint")
    section = section if isinstance(section, Mapping) else {}
    metric, is_lowest = section.get("best_metric", "eval/loss"), section.get("best_is", "lowest") == "lowest"
    metrics = run / "metrics.jsonl"
    if not can_read(metrics):
        return None
    with metrics.open("rb") as file:
        lines = [line for line in file if b'"eval/' in line]
    values = [one.get(metric) for one in _parsed(line.decode(errors="replace") for line in lines)]
    finite = [value for value in values if isinstance(value, float) and isfinite(value)]
    return (min if is_lowest else max)(finite, default=None)


def _last_logged(run: Path) -> dict[str, Any]:
    return next((values for values in reversed(last_objects(run / "metrics.jsonl")) if "loss" in values), {})


def events_of_last_start(run: Path) -> list[dict[str, Any]]:
    """Those since the run was last started, as far as the tail of the file goes: older ones tell of lost work, too."""
    events = [event for event in last_objects(run / "events.jsonl") if isinstance(event.get("event"), str)]
    starts = [index for index, event in enumerate(events) if event["event"] in ("started", "resumed", "rolled_back")]
    return events[starts[-1] :] if starts else events


def _last_step(events: Sequence[Mapping[str, Any]], logged: Mapping[str, Any], checkpoint: int | None) -> int:
    """A checkpoint counts where no event says that the run has begun again from an earlier one."""
    told = [event.get("to_step" if event["event"] == "rolled_back" else "step") for event in events]
    told += [logged.get("step"), None if events else checkpoint]
    return max((step for step in told if isinstance(step, int)), default=0)


def last_objects(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in the last lines of a file."""
    return [*_parsed(tail(path))]


def can_read(path: Path) -> bool:
    """Return whether it is a file that this user may read: runs of several people lie in one folder."""
    return os.access(path, os.R_OK) and path.is_file()  # first, since `is_file` raises in a folder that is closed


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of all lines of a file, one by one; of one that is not there, none."""
    if can_read(path):
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from _parsed(lines)


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # the end of it is being written, or the beginning is before the tail
            continue
        if isinstance(values, dict):
            yield values


def tail(path: Path, n_bytes: int = 16_384) -> list[str]:
    """At least the last 20 lines; a run of weeks has metrics of megabytes, and one of many layers has long lines."""
    if not path.is_file():  # a pipe would be waited for
        return []
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            while True:
                file.seek(max(0, size - n_bytes))
                read = file.read()
                if n_bytes >= size or read.count(b"\n") > 20:
                    return read.decode(errors="replace").splitlines()
                n_bytes *= 4
    except OSError:
        return []


def _age(run: Path) -> float | None:
    files = [run / name for name in ("log.txt", "metrics.jsonl", "lease.json")]
    written = [file.stat().st_mtime for file in files if file.exists()]
    return max(0.0, time.time() - max(written)) if written else None
