"""How far a run is, read from its directory while it may be running; nothing is written and nothing is locked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_core.job import read_document
from forge_core.run.fatal import fatal_error
from forge_plugins_slurm.job_record import JobRecord, last_job
from forge_plugins_slurm.queue import QueuedJob

ALIVE = 30.0
"""Seconds after a sign of life during which a run that is not in Slurm's queue counts as running."""


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
    checkpoint: int | None
    """Step of the newest checkpoint."""
    job_id: str | None
    reason: str
    """What Slurm adds: why the job waits, or on which nodes it runs; or what has killed the run."""
    age: float | None
    """Seconds since the run has last written something."""


def runs_in(folder: Path) -> list[Path]:
    """The directories of runs in ``folder``: itself, or those in it, by name."""
    if _is_run(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path)) if folder.is_dir() else []


def progress_of(run: Path, job: JobRecord | None, queue: Mapping[str, QueuedJob]) -> RunProgress:
    """Args: ``job`` is the run's newest, and ``queue`` has those that wait or run, by id."""
    steps = _total_steps(run)
    logged = _last_logged(run)
    checkpoint = max(checkpoint_steps(run), default=None)
    in_queue = queue.get(job.job_id) if job else None
    age = _age(run)
    events = _events_of_last_start(run)
    state = _state(events, in_queue, age, is_complete=steps is not None and checkpoint == steps)
    killed = fatal_error(run) if state == "failed" else None
    return RunProgress(
        name=run.name,
        path=run,
        state=state,
        step=_last_step(events, logged, checkpoint),
        steps=steps,
        loss=logged.get("loss"),
        checkpoint=checkpoint,
        job_id=job.job_id if job else None,
        reason=in_queue.reason if in_queue else f"killed by {killed}" if killed else "",
        age=age,
    )


def checkpoint_steps(run: Path) -> Iterator[int]:
    """The steps of the committed checkpoints; a folder has this name only once it is whole."""
    for manifest in run.glob("checkpoints/step_*/manifest.json"):
        digits = manifest.parent.name.removeprefix("step_")
        if digits.isdecimal():
            yield int(digits)


def _is_run(path: Path) -> bool:
    return (path / "job.toml").is_file() or last_job(path) is not None


def _state(events: Sequence[Mapping[str, Any]], job: QueuedJob | None, age: float | None, *, is_complete: bool) -> str:
    if job is not None:
        return "queued" if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING") else "running"
    if is_complete:
        return "finished"
    if age is None:
        return "prepared"
    ended = events[-1]["event"] if events else ""
    if ended in ("stopped", "preempted"):
        return "stopped"
    if ended == "failed":
        return "failed"
    return "running" if age < ALIVE else "failed"


def _total_steps(run: Path) -> int | None:
    for path in (run / "job.toml", run / "slurm" / "job.toml"):
        try:
            return int(read_document(path).table["train"]["steps"])
        except (ConfigError, KeyError, TypeError, ValueError):
            continue
    return None


def _last_logged(run: Path) -> dict[str, Any]:
    return next((values for values in reversed(_objects(run / "metrics.jsonl")) if "loss" in values), {})


def _events_of_last_start(run: Path) -> list[dict[str, Any]]:
    """Those since the run was last started, as far as the tail of the file goes: older ones tell of lost work, too."""
    events = [event for event in _objects(run / "events.jsonl") if isinstance(event.get("event"), str)]
    starts = [index for index, event in enumerate(events) if event["event"] in ("started", "resumed", "rolled_back")]
    return events[starts[-1] :] if starts else events


def _last_step(events: Sequence[Mapping[str, Any]], logged: Mapping[str, Any], checkpoint: int | None) -> int:
    """A checkpoint counts where no event says that the run has begun again from an earlier one."""
    told = [event.get("to_step" if event["event"] == "rolled_back" else "step") for event in events]
    told += [logged.get("step"), None if events else checkpoint]
    return max((step for step in told if isinstance(step, int)), default=0)


def _objects(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in the last lines of a file."""
    found = []
    for line in _tail(path):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # the end of it is being written, or the beginning is before the tail
            continue
        if isinstance(values, dict):
            found.append(values)
    return found


def _tail(path: Path, n_bytes: int = 16_384) -> list[str]:
    """The last lines; a run of weeks has metrics of megabytes."""
    if not path.is_file():  # a pipe would be waited for
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - n_bytes))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _age(run: Path) -> float | None:
    files = [run / name for name in ("log.txt", "metrics.jsonl", "lease.json")]
    written = [file.stat().st_mtime for file in files if file.exists()]
    return max(0.0, time.time() - max(written)) if written else None
