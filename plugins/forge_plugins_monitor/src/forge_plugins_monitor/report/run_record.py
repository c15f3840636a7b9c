"""A run as its directory tells of it, also while it is running; nothing is written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_monitor.run_states.progress import can_read

_NUMBERS = (float, int, type(None))
"""A run writes null for a number that is not finite."""


@attrs.frozen
class Curve:
    """One metric of one run, by ascending steps, each of them once."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    """``None`` where the value was not finite."""

    @property
    def last(self) -> float | None:
        """The newest value; ``None`` also where there is none."""
        return self.values[-1] if self.values else None


@attrs.frozen(kw_only=True, eq=False)
class RunRecord:
    """One run. Where a file is missing or damaged, what can be read of it is there."""

    index: int
    """Its place among the runs of the report, from 0: decides the colour."""
    label: str
    """Its name, with as much of the path in front as it takes to be the only one of that label."""
    path: Path
    lines: Sequence[Mapping[str, Any]]
    """``metrics.jsonl``: each line has an int ``step``."""
    events: Sequence[Mapping[str, Any]]
    """``events.jsonl``, of all attempts: each has a string ``event``."""
    job: Mapping[str, Any]
    """``job.toml``, resolved; empty if it cannot be read."""
    environment: Mapping[str, Any]
    """``environment.json``; empty if it cannot be read."""
    problems: Sequence[str] = ()
    """A sentence for each thing that could not be read."""

    def curve(self, name: str) -> Curve:
        """The values of a metric; without points if the run has none of that name."""
        return self._curves.get(name, Curve((), ()))

    def metrics(self) -> list[str]:
        """The names of metrics of numbers, in the order in which they first come."""
        return list(self._curves)

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        columns: dict[str, dict[int, float | None]] = {}
        for line in self.lines:
            step = line["step"]
            for name, value in line.items():
                if type(value) in _NUMBERS:
                    columns.setdefault(name, {})[step] = value
        columns.pop("step", None)
        return {name: _curve(column) for name, column in columns.items()}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The directories of runs that are meant, each once: a run's own, or those of the runs in a folder, by name.

    Raises:
        ConfigError: one is neither.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        runs = [path] if _is_run(path) else sorted(filter(_is_run, path.iterdir())) if path.is_dir() else []
        if not runs:
            why = (
                "there is no job.toml in it, nor in a folder of it, that can be read"
                if path.is_dir()
                else _why_no_folder(path)
            )
            raise ConfigError(f"RUN: {path} is neither a run's directory nor a folder of runs: {why}")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs in these directories, in this order."""
    return [_read(path, index, label) for index, (path, label) in enumerate(zip(paths, labels(paths), strict=True))]


def labels(paths: Sequence[Path]) -> list[str]:
    """For each directory the end of its path, as short as can be without two being equal."""
    parts = [path.resolve().parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        n = next((n for n in range(1, len(own)) if all(own[-n:] != other[-n:] for other in others)), len(own))
        names.append("/".join(own[-n:]))
    return names


def _why_no_folder(path: Path) -> str:
    return "it is a file" if path.exists() else "there is no such folder"


def _is_run(path: Path) -> bool:
    return can_read(path / "job.toml")


def _read(path: Path, index: int, label: str) -> RunRecord:
    problems: list[str] = []
    lines = [line for line in _objects(path / "metrics.jsonl", problems) if _is_step(line.get("step"))]
    events = [event for event in _objects(path / "events.jsonl", problems) if isinstance(event.get("event"), str)]
    return RunRecord(
        index=index,
        label=label,
        path=path,
        lines=lines,
        events=events,
        job=_table(path / "job.toml", tomllib.loads, problems),
        environment=_table(path / "environment.json", json.loads, problems),
        problems=problems,
    )


def _table(path: Path, loads: Any, problems: list[str]) -> dict[str, Any]:
    try:
        table = loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # the run has been prepared, and not started
        return {}
    except (OSError, ValueError, RecursionError) as error:  # of TOML, JSON and UTF-8: all are ValueErrors
        problems.append(f"{path} cannot be read: {error}")
        return {}
    return table if isinstance(table, dict) else {}


def _objects(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; other lines are counted, but for a last one that is being written."""
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path} cannot be read: {error}")
        return []
    try:
        objects = json.loads(b"[%s]" % b",".join(lines))  # at once: half the time
    except (ValueError, RecursionError):
        objects = [_json(line) for line in lines if line.strip()]
    found = [one for one in objects if isinstance(one, dict)]
    if odd := len(objects) - len(found):
        problems.append(f"{path}: {odd} line{'s' * (odd > 1)} left out, which cannot be read")
    return [*found, *(one for one in [_json(last)] if isinstance(one, dict))]


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _curve(column: Mapping[int, float | None]) -> Curve:
    steps = sorted(column)  # a run writes them so; a file that was put together by hand may differ
    try:
        values = tuple([x if (x := column[step]) is not None and isfinite(x) else None for step in steps])
    except OverflowError:  # an integer that is too large for a float
        values = tuple(_finite(column[step]) for step in steps)
    return Curve(tuple(steps), values)


def _finite(value: float | None) -> float | None:
    try:
        return value if value is not None and isfinite(value) else None
    except OverflowError:
        return None


def attempts(events: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """The events of each attempt: from one start of the run to before the next."""
    starts = [index for index, event in enumerate(events) if event["event"] in ("started", "resumed")]
    for start, end in pairwise([*starts, len(events)]):
        yield events[start:end]
