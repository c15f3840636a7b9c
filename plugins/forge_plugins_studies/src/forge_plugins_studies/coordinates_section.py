"""The report section of a coordinate check: how far training moves activations, against the size of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from forge_plugins_monitor.report.log_log import LogLog, Mark, Series
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_studies.config import COORDINATES, PLACES

_AXES = {"dim": "width (model.dim)", "n_layers": "layers (model.n_layers)"}
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Changes beyond these are not drawn."""


class CoordinatesSection(ReportSection):
    """Runs of at least two sizes that have the callback ``coordinates``."""

    title = "Coordinates"
    place = 12.0  # what such runs are for: before their curves

    def render(self, runs: Sequence[RunRecord]) -> str:
        measured = [
            run for run in runs if run.curve(_name(PLACES[0])).steps and all(_size(run, axis) for axis in _AXES)
        ]
        pictures = [
            _picture(measured, axis, other, place)
            for axis, other in (("dim", "n_layers"), ("n_layers", "dim"))
            if len({_size(run, axis) for run in measured}) > 1
            for place in PLACES
        ]
        if not any(pictures):
            return ""
        note = (
            "Mean absolute change of activations since before the first update, on one batch, and over seeds. Level "
            "lines: training changes the model as much at every size."
        )
        colors = "".join(
            f'<span class="swatch" style="background:var(--c{updates % 10})"></span>{updates} &ensp;'
            for updates in _updates(measured)
        )
        legend = f'<p class="note">{escape(note)} Updates: {colors}</p>'
        return f'{legend}<div class="charts">{"".join(pictures)}</div>'


def _name(place: str) -> str:
    return f"{COORDINATES}/change/{place}"


def _size(run: RunRecord, axis: str) -> int:
    """0 if the job does not say."""
    model: Mapping[str, Any] = run.job.get("model", {})
    value = model.get(axis) if isinstance(model, Mapping) else None
    return value if type(value) is int and value > 0 else 0


def _picture(runs: Sequence[RunRecord], axis: str, other: str, place: str) -> str:
    """A line for each number of updates and each size along the other axis."""
    series = []
    for size in sorted({_size(run, other) for run in runs}):
        alike = sorted((run for run in runs if _size(run, other) == size), key=lambda run: _size(run, axis))
        for updates in _updates(alike):
            points = [
                (x, _mean([run for run in alike if _size(run, axis) == x], _name(place), updates + 1))
                for x in dict.fromkeys(_size(run, axis) for run in alike)
            ]
            words = f"after {updates} updates, {other} {size}, {axis}"
            marks = [Mark(x, y, f"{place} {words} {x}: {y:.4g}") for x, y in points if y]
            series.append(Series(color=updates, marks=marks, is_joined=True))
    values = [mark.y for one in series for mark in one.marks]
    if not values:
        return ""
    sizes = sorted({_size(run, axis) for run in runs})
    return LogLog(
        label=f"change of {place} against {_AXES[axis]}",
        x_title=_AXES[axis],
        y_title=f"change of {place}",
        x_range=(sizes[0] / 1.2, sizes[-1] * 1.2),
        y_range=(min(values) / 1.5, max(values) * 1.5),
        series=series,
        x_ticks=sizes,
    ).html()


def _updates(runs: Sequence[RunRecord]) -> list[int]:
    return sorted({step - 1 for run in runs for step in run.curve(_name(PLACES[0])).steps} - {0})


def _mean(runs: Sequence[RunRecord], name: str, step: int) -> float:
    """Over the seeds of one size; 0 where one has no number."""
    values = [_at(run, name, step) for run in runs]
    return sum(values) / len(values) if all(values) else 0.0


def _at(run: RunRecord, name: str, step: int) -> float:
    """0 where there is no number that can be drawn."""
    curve = run.curve(name)
    value = dict(zip(curve.steps, curve.values, strict=True)).get(step)
    return value if value is not None and math.isfinite(value) and _SMALLEST < value < _LARGEST else 0.0
