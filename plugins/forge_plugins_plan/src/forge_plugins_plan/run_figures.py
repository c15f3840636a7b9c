"""What a run has taken, beside what is planned of its job."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_plan.report import GIB, Plan

_FAR = 0.1
"""The part of what is planned by which a run may differ before it is said."""


@attrs.frozen(kw_only=True)
class RunFigures:
    """The figures of a run's ``metrics.jsonl``, of its last start: an earlier one may have had another layout."""

    path: Path
    ranks: int
    lines: int
    """Logged steps, without the first, in which blocks are compiled and memory is found."""
    step_seconds: float
    """The median of them."""
    peak_bytes: int | None
    """The most that was allocated on the GPU of rank 0; ``None`` without one."""


def run_figures(path: Path) -> RunFigures:
    """Read them from a run's directory.

    Raises:
        ConfigError: it is none, or the run has logged fewer than two steps.
    """
    try:
        ranks = json.loads((path / "environment.json").read_text(encoding="utf-8"))["world_size"]
        starts = [line["step"] for line in _lines(path / "events.jsonl") if line["event"] in ("started", "resumed")]
        lines = (line for line in _lines(path / "metrics.jsonl") if "step_seconds" in line)
        logged = [line for line in lines if line["step"] > starts[-1]][1:]
    except (OSError, TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"{path}: cannot be read as a run's directory: {type(error).__name__}: {error}") from error
    if not logged:
        raise ConfigError(
            f"{path}: its run has logged fewer than two steps since it was started last, and the first is slower than "
            "others"
        )
    memory = [line["memory_gib"] for line in logged if "memory_gib" in line]
    return RunFigures(
        path=path,
        ranks=ranks,
        lines=len(logged),
        step_seconds=statistics.median(line["step_seconds"] for line in logged),
        peak_bytes=round(max(memory) * GIB) if memory else None,
    )


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    *lines, _ = path.read_text(encoding="utf-8").split("\n")  # the last may be half written
    return map(json.loads, lines)


def as_text(run: RunFigures, plan: Plan) -> Iterator[str]:
    """A table of both, and what is far off."""
    planned_peak = next(stage.peak_bytes for stage in plan.stages if stage.rank == 0)
    rows = {
        "time of a step, s": (None if plan.time is None else plan.time.seconds, run.step_seconds),
        "peak of rank 0, GiB": (_gib(planned_peak), _gib(run.peak_bytes)),
    }
    yield f"{f'Median of {run.lines} logged steps of {run.path}':<46}{'planned':>12}{'run':>12}{'ratio':>8}"
    far = []
    for what, (planned, taken) in rows.items():
        ratio = taken / planned if planned and taken else None
        cells = ("–" if value is None else f"{value:.3f}" for value in (planned, taken))
        yield (
            f"  {what:<44}"
            + "".join(f"{cell:>12}" for cell in cells)
            + f"{'–' if ratio is None else f'{ratio:.2f}':>8}"
        )
        if ratio is not None and abs(ratio - 1) > _FAR:
            far.append(what.partition(",")[0])
    if far:
        yield f"  More than {_FAR:.0%} off: {' and '.join(far)}"
    if plan.time is None:
        yield "  For the time of a step, give --gpu NAME or --calibration FILE, or measure this machine: --calibrate"


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB
