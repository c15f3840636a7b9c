"""How much of its time a run has trained for good, told from its own files."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import attrs

from forge_plugins_monitor.run_states.progress import RunProgress, objects

_STARTS = ("started", "resumed")
_SAVED_ENDS = ("completed", "preempted", "stopped")
_ENDS = (*_SAVED_ENDS, "failed")
_NAMES = ("step", "step_seconds", "skipped", "overflows")


@attrs.frozen(kw_only=True)
class EffectiveTime:
    """Of all starts of a run, what lies between them included."""

    ratio: float
    """Time of steps that stay, over time since the first start."""
    seconds: float
    """Since the first start, until the run ended, was killed, or now if it goes on or waits in the queue."""
    kept_seconds: float
    """Of steps that stay: not done again after a resumption, and with their update not left out."""
    kept_steps: int
    left_out_steps: int
    waited_seconds: float
    """That training has waited for saves."""
    starts: int


def effective_time(run: Path, progress: RunProgress) -> EffectiveTime | None:
    """What the events and metrics of ``run`` tell, or ``None`` where they do not tell it.

    Lines of metrics about steps that were lost have been taken out by the run itself; each other one has the mean
    duration of the steps since the line before, without evaluations and saves. The first line after each start counts
    as the median of the others if it is longer, since it has warming up and compiling in it.
    """
    events = [event for event in objects(run / "events.jsonl") if isinstance(event.get("event"), str)]
    lines = [
        {name: line[name] for name in _NAMES if name in line}
        for line in objects(run / "metrics.jsonl")
        if type(line.get("step")) is int and type(line.get("step_seconds")) is float
    ]
    begun = _time_of(events[0]) if events and events[0]["event"] in _STARTS else None
    ended = _end(events, progress)
    if begun is None or ended is None or not lines:
        return None
    kept = _kept(lines, events, _kept_until(events, progress))
    if not 0 < kept.seconds <= ended - begun:
        return None
    return EffectiveTime(
        ratio=kept.seconds / (ended - begun),
        seconds=ended - begun,
        kept_seconds=kept.seconds,
        kept_steps=kept.steps,
        left_out_steps=kept.left_out,
        waited_seconds=sum(
            seconds
            for event in events
            if event["event"] in ("saved", "kept_in_memory") and type(seconds := event.get("seconds_blocked")) is float
        ),
        starts=sum(event["event"] in _STARTS for event in events),
    )


def in_words(told: EffectiveTime) -> str:
    """One line."""
    left_out = f", {told.left_out_steps} were left out" if told.left_out_steps else ""
    starts = "its start" if told.starts == 1 else f"the first of {told.starts} starts"
    return (
        f"effective training time: {told.ratio:.1%} of {_duration(told.seconds)} since {starts}; {told.kept_steps} "
        f"steps that stay took {_duration(told.kept_seconds)}{left_out}; training waited "
        f"{_duration(told.waited_seconds)} for saves"
    )


@attrs.define
class _Kept:
    seconds: float = 0.0
    steps: int = 0
    left_out: int = 0


def _kept(lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], until: int | None) -> _Kept:
    """Args: ``until`` is the last step that stays, if later ones do not."""
    first = _first_lines(lines, events)
    usual = median([line["step_seconds"] for line in lines if line["step"] not in first] or [math.inf])
    kept, before, left_out_before = _Kept(), 0, 0
    for line in lines:
        step = line["step"] if until is None else min(line["step"], until)
        counts = [line[name] for name in ("skipped", "overflows") if type(line.get(name)) is int]
        left_out = sum(counts) if counts else left_out_before
        n_left_out = min(max(0, left_out - left_out_before), max(0, step - before))
        steps = max(0, step - before) - n_left_out
        seconds = min(line["step_seconds"], usual) if line["step"] in first else line["step_seconds"]
        kept.seconds += steps * seconds
        kept.steps += steps
        kept.left_out += n_left_out
        before, left_out_before = max(before, step), left_out
    return kept


def _first_lines(lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> set[int]:
    """Steps of the lines that are the first after a start."""
    started = [event.get("step") for event in events if event["event"] in _STARTS]
    firsts = ((line["step"] for line in lines if line["step"] > step) for step in started if isinstance(step, int))
    return {found for steps in firsts if (found := next(steps, None)) is not None}


def _kept_until(events: Sequence[Mapping[str, Any]], progress: RunProgress) -> int | None:
    """A run that is gone without having saved goes on from its newest checkpoint, or begins again."""
    last = events[-1]["event"]
    if last in _SAVED_ENDS or (progress.state == "running" and last != "failed"):
        return None
    return progress.checkpoint or 0


def _end(events: Sequence[Mapping[str, Any]], progress: RunProgress) -> float | None:
    if progress.state in ("running", "queued"):
        return time.time()
    last = events[-1] if events else {}
    if last.get("event") in _ENDS:
        return _time_of(last)
    return None if progress.age is None else time.time() - progress.age


def _time_of(event: Mapping[str, Any]) -> float | None:
    """Seconds since 1970."""
    try:
        told = datetime.fromisoformat(event["time"])
    except (KeyError, TypeError, ValueError):
        return None
    return None if told.tzinfo is None else told.timestamp()


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
