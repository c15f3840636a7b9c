"""A run as its directory tells of it, also while it is running; nothing is written."""

from __future__ import annotations

import json
import tomllib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress, groupby, islice, pairwise
from math import isfinite, nan
from operator import lt
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_monitor.run_states.progress import can_read

_NUMBERS = {float, int, type(None)}
"""A run writes null for a number that is not finite."""
_AT_ONCE = 1 << 22
"""Bytes of a file that are read at once: as objects they take about ten times as much."""


Columns = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""Steps and values of each name, in the order of lines; not finite where the run's value was not."""


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
    """``metrics.jsonl``: each line has an int ``step``. Of a run of weeks they take gigabytes; ``curve`` does not."""
    events: Sequence[Mapping[str, Any]]
    """``events.jsonl``, of all attempts: each has a string ``event``."""
    job: Mapping[str, Any]
    """``job.toml``, resolved; empty if it cannot be read."""
    environment: Mapping[str, Any]
    """``environment.json``; empty if it cannot be read."""
    problems: Sequence[str] = ()
    """A sentence for each thing that could not be read."""

    columns: Columns = attrs.field(
        default=attrs.Factory(lambda self: columns_of([self.lines]), takes_self=True), repr=False
    )
    """The numbers of ``lines``; made of them where they are not given."""

    @property
    def last_step(self) -> int:
        """The highest step of a line; 0 without one."""
        return max(self.columns["step"][0], default=0) if "step" in self.columns else 0

    def curve(self, name: str) -> Curve:
        """The values of a metric; without points if the run has none of that name. It is made at each call."""
        return _curve(*self.columns[name]) if name in self.columns and name != "step" else Curve((), ())

    def metrics(self) -> list[str]:
        """The names of metrics of numbers, in the order in which they first come."""
        return [name for name in self.columns if name != "step"]


def columns_of(chunks: Iterable[Sequence[Mapping[str, Any]]]) -> Columns:
    """The numbers of lines, which are given some at a time so that not all of them need be there."""
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for lines in map(_with_step, chunks):
        for names, alike in groupby(lines, tuple):  # nearly all lines of a run have the same names
            table = dict(zip(names, zip(*(line.values() for line in alike), strict=True), strict=True))
            for name, values in table.items():
                steps = table["step"]
                if not _NUMBERS.issuperset(map(type, values)):
                    are_numbers = [type(value) in _NUMBERS for value in values]
                    steps, values = tuple(compress(steps, are_numbers)), tuple(compress(values, are_numbers))
                if values:
                    column = columns.setdefault(name, (array("q"), array("d")))
                    column[0].extend(array("q", steps))
                    column[1].extend(_floats(values))
    return columns


def _floats(values: Sequence[float | None]) -> array[float]:
    try:
        return array("d", values)  # type: ignore[arg-type]  # fails with None
    except (OverflowError, TypeError):
        return array("d", [_finite(value) for value in values])


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
    ends = Counter(own[-n:] for own in set(parts) for n in range(1, len(own) + 1))
    return ["/".join(next(own[-n:] for n in range(1, len(own) + 1) if ends[own[-n:]] == 1)) for own in parts]


def _why_no_folder(path: Path) -> str:
    return "it is a file" if path.exists() else "there is no such folder"


def _is_run(path: Path) -> bool:
    return can_read(path / "job.toml")


def _read(path: Path, index: int, label: str) -> RunRecord:
    problems: list[str] = []
    metrics = path / "metrics.jsonl"
    columns = columns_of(_objects(metrics, problems))
    events = [one for some in _objects(path / "events.jsonl", problems) for one in some]
    return RunRecord(
        index=index,
        label=label,
        path=path,
        lines=_Lines(metrics),
        columns=columns,
        events=[event for event in events if isinstance(event.get("event"), str)],
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


class _Lines(Sequence[Any]):
    """Of a file, read whole only where a section asks for them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    @cached_property
    def _all(self) -> list[Mapping[str, Any]]:
        return [line for some in _objects(self._path, []) for line in _with_step(some)]


def _with_step(objects: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [one for one in objects if _is_step(one.get("step"))]


def _objects(path: Path, problems: list[str]) -> Iterator[list[dict[str, Any]]]:
    """The JSON objects of a file of lines, some at a time; other lines are counted, but for a last one that is being
    written."""
    odd = 0
    try:
        with path.open("rb") as file:
            while lines := file.readlines(_AT_ONCE):
                last = b"" if lines[-1].endswith(b"\n") else lines.pop()
                values = _parsed(lines)
                found = [one for one in values if isinstance(one, dict)]
                odd += len(values) - len(found)
                yield [*found, *(one for one in [_json(last)] if isinstance(one, dict))]
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path} cannot be read: {error}")
    if odd:
        problems.append(f"{path}: {odd} line{'s' * (odd > 1)} left out, which cannot be read")


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    try:
        return list(json.loads(b"[%s]" % b",".join(lines)))  # at once: half the time
    except (ValueError, RecursionError):
        return [_json(line) for line in lines if line.strip()]


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _curve(steps: Sequence[int], values: Sequence[float]) -> Curve:
    if not all(map(lt, steps, islice(steps, 1, None))):  # a file that was put together by hand
        steps, values = zip(*sorted(dict(zip(steps, values, strict=True)).items()), strict=True)
    return Curve(tuple(steps), _with_gaps(values))


def _with_gaps(values: Sequence[float]) -> tuple[float | None, ...]:
    is_whole = all(map(isfinite, values))
    return tuple(values) if is_whole else tuple([value if isfinite(value) else None for value in values])


def _finite(value: float | None) -> float:
    try:
        return nan if value is None else float(value)
    except OverflowError:  # an integer that is too large
        return nan


def attempts(events: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """The events of each attempt: from one start of the run to before the next."""
    starts = [index for index, event in enumerate(events) if event["event"] in ("started", "resumed")]
    for start, end in pairwise([*starts, len(events)]):
        yield events[start:end]
