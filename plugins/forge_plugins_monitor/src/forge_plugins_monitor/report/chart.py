"""Charts: curves of runs over steps, drawn by the page's script from the numbers that stand in the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import attrs

from forge_plugins_monitor.report.run_record import Curve, RunRecord

MOST_POINTS = 800
"""Of a curve, unless a chart says otherwise."""
_DIGITS = 6
"""Significant digits of a value."""
_MEANS = 100
"""Stretches of a noisy curve whose means are drawn over it."""
_NOISY = 10.0
"""A curve is noisy that goes up and down by this multiple of the range of its values."""


@attrs.frozen(kw_only=True)
class Chart:
    """One metric of several runs."""

    title: str
    unit: str = ""
    """Stands at the axis of values: ``"nats a token"``."""
    curves: Mapping[RunRecord, Curve]
    with_events: bool = False
    """Whether events of the runs are marked at their steps."""
    most_points: int = MOST_POINTS
    """A longer curve is thinned to this number of points."""

    def html(self) -> str:
        """A ``figure``; empty if no curve has a point."""
        curves = {run: curve for run, curve in self.curves.items() if curve.steps}
        if not curves:
            return ""
        drawn = [_numbers(run, curve, self.most_points) for run, curve in curves.items()]
        data = {"title": self.title, "unit": self.unit, "events": self.with_events, "curves": drawn}
        notes = [
            f"{run.label}: {gaps:,} value{'s' * (gaps > 1)} not finite"
            for run, curve in curves.items()
            if (gaps := curve.values.count(None))
        ]
        note = f'<p class="note">{escape("; ".join(notes))}</p>' if notes else ""
        return (
            f'<figure class="chart"><figcaption>{escape(self.title)}</figcaption>'
            f'<script type="application/json">{as_json(data)}</script>{note}</figure>'
        )


def charts(figures: Iterable[Chart]) -> str:
    """Charts beside each other where there is room; empty if none has a point. Curves of a chart that is only made here
    are gone before the next one's come."""
    drawn = "\n".join(filter(None, (chart.html() for chart in figures)))
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def thinned(curve: Curve, most: int) -> Curve:
    """The curve with about ``most`` points, which looks the same: the lowest and the highest value of each stretch of
    it stay, and so do the first and the last point, and a gap where there is one."""
    n = len(curve.steps)
    if n <= most:
        return curve
    stretches = max(1, most // 2 - 1)
    kept = {0, n - 1}
    for stretch in range(stretches):
        start, end = n * stretch // stretches, n * (stretch + 1) // stretches
        values = curve.values[start:end]
        finite = _finite(values)
        kept |= {start + values.index(value) for value in {min(finite), max(finite)}} if finite else set()
        kept |= {start + values.index(None)} if len(finite) < len(values) else set()
    indices = sorted(kept)
    return Curve(tuple(curve.steps[i] for i in indices), tuple(curve.values[i] for i in indices))


def as_json(data: Any) -> str:
    """JSON that may stand in a ``script``: nothing in it ends one."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def means(curve: Curve) -> Curve:
    """The means of stretches of a noisy curve, each at the middle of its steps; of any other one, no point."""
    n = len(curve.steps)
    if n < 4 * _MEANS or not _is_noisy(thinned(curve, MOST_POINTS)):
        return Curve((), ())
    points = []
    for stretch in range(_MEANS):
        start, end = n * stretch // _MEANS, n * (stretch + 1) // _MEANS
        finite = _finite(curve.values[start:end])
        points.append((curve.steps[(start + end) // 2], sum(finite) / len(finite) if finite else None))
    steps, values = zip(*points, strict=True)
    return Curve(steps, values)


def _is_noisy(curve: Curve) -> bool:
    finite = _finite(curve.values)
    travel = sum(abs(after - before) for before, after in pairwise(finite))
    return travel > 0 and travel > _NOISY * (max(finite) - min(finite))


def _finite(values: Sequence[float | None]) -> Sequence[float]:
    return [value for value in values if value is not None] if None in values else values  # type: ignore[return-value]  # no None


def _numbers(run: RunRecord, curve: Curve, most: int) -> dict[str, Any]:
    few, smooth = thinned(curve, most), means(curve)
    numbers: dict[str, Any] = {"run": run.index, "x": few.steps, "y": _shortened(few)}
    return numbers | {"meanX": smooth.steps, "meanY": _shortened(smooth)} if smooth.steps else numbers


def _shortened(curve: Curve) -> list[float | None]:
    return [None if value is None else _short(value) for value in curve.values]


def _short(value: float) -> float:
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
