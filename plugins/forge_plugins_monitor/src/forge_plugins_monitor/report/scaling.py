"""The section of scaling laws: loss against compute."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import attrs

from forge_plugins_monitor.report.log_log import LogLog, Mark, Series
from forge_plugins_monitor.report.power_law import PowerLaw, fit
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import listing

_LEAST_SIZES = 3
_LEAST_FOR_FLOOR = 5
"""Sizes below which no irreducible loss is fitted."""
_LEAST_EXPONENT = 1e-9
"""What rounding makes of a loss that does not change is less."""
_LEAST_SPAN = 2.0
"""Of the highest compute to the lowest: over less, noise decides the slope."""
_LEAST, _LARGEST = 1e-30, 1e60
"""Numbers beyond these are no sizes, costs or losses of a run."""


@attrs.frozen(kw_only=True)
class Point:
    """The end of a run."""

    run: RunRecord
    parameters: int
    tokens: float
    compute: float
    """FLOPs of training up to there."""
    loss: float
    """Nats a token."""


class Scaling(ReportSection):
    """Last losses of runs of at least three sizes against what they have cost, and the power law through them."""

    title = "Scaling"
    place = 25.0

    def render(self, runs: Sequence[RunRecord]) -> str:
        points, name = points_of(runs)
        if len({point.parameters for point in points}) < _LEAST_SIZES:
            return ""
        law, sentence = _law(points, name)
        rows = [
            (
                point.run.label,
                f"{point.parameters:,}",
                f"{point.tokens:,.0f}",
                f"{point.tokens / point.parameters:.2f}",
                f"{point.compute:.3g}",
                f"{point.loss:.4f}",
                *([f"{law(point.compute):.4f}"] if law else []),
            )
            for point in sorted(points, key=lambda point: point.compute)
        ]
        head = ("run", "parameters", "tokens", "tokens a parameter", "FLOPs", name, *(["fitted"] if law else []))
        return f'<p class="note">{escape(sentence)}</p>{_picture(points, law, name)}{listing(head, rows)}'


def points_of(runs: Sequence[RunRecord]) -> tuple[list[Point], str]:
    """The end of each run that says what its model costs, and the loss that all of them have: ``eval/loss``, or else
    ``loss``."""
    able = [run for run in runs if _end(run, "loss") or _end(run, "eval/loss")]
    name = "eval/loss" if able and all(_end(run, "eval/loss") for run in able) else "loss"
    return [point for run in able if (point := _end(run, name))], name


def _end(run: RunRecord, name: str) -> Point | None:
    """Nothing where a number is missing or odd: files may be damaged, or written by something else."""
    curve, tokens = run.curve(name), run.curve("tokens")
    parameters, flops = run.environment.get("n_parameters"), run.environment.get("flops_per_token")
    if not curve.steps or not tokens.steps:
        return None
    numbers = [_number(one) for one in (parameters, flops, curve.last, curve.steps[-1], tokens.last, tokens.steps[-1])]
    if not all(numbers) or numbers[0] < 1:
        return None
    size, cost, loss, step, seen, at = numbers
    seen *= step / at
    return Point(run=run, parameters=int(size), tokens=seen, compute=seen * cost, loss=loss)


def _number(value: object) -> float:
    """0 for what is no size, cost or loss of a run."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and _LEAST <= value <= _LARGEST else 0.0  # type: ignore[operator, arg-type]  # it is one


def _law(points: Sequence[Point], name: str) -> tuple[PowerLaw | None, str]:
    """The law, and what is said of it; or no law, and why."""
    computes = [point.compute for point in points]
    if max(computes) < _LEAST_SPAN * min(computes):
        return None, (
            f"No law is fitted: the highest compute is {max(computes) / min(computes):.2f} times the lowest, and it "
            f"takes {_LEAST_SPAN:g} times to tell a slope from noise."
        )
    try:
        sizes = {point.parameters for point in points}
        law = fit(computes, [point.loss for point in points], with_floor=len(sizes) >= _LEAST_FOR_FLOOR)
        is_drawn = all(_number(law(compute)) for compute in (min(computes) / 1.5, max(computes) * 3))
    except (OverflowError, ValueError):  # powers beyond floats, or 0
        is_drawn = False
    if not is_drawn:
        return None, "No law is fitted: the losses are too far from each other."
    if law.exponent <= _LEAST_EXPONENT:
        return None, f"No law is fitted: the loss does not fall with compute ({name} of {len(points)} runs)."
    return law, _words(law, name, len(points))


def _words(law: PowerLaw, name: str, n: int) -> str:
    floor = f"{law.floor:.3f} + " if law.floor else ""
    return (
        f"{name} = {floor}{law.factor:.4g} · C^−{law.exponent:.4f}, fitted to the ends of {n} runs by least squares of "
        f"logarithms (R² = {law.r_squared:.4f}). C is the FLOPs of training. The law means what it says only if each "
        "run had its best learning rate, and its schedule came to its end."
    )


def _picture(points: Sequence[Point], law: PowerLaw | None, name: str) -> str:
    low, high = min(point.compute for point in points) / 1.5, max(point.compute for point in points) * 3
    losses = [*(point.loss for point in points), *([law(low), law(high)] if law else [])]
    steps = [low * (high / low) ** (i / 60) for i in range(61)] if law else []
    series = []
    for point in points:
        costs = f"{point.parameters:,} parameters, {point.compute:.3g} FLOPs"
        words = f"{point.run.label}: {costs}, {name} {point.loss:.4f}"
        series.append(Series(color=point.run.index, marks=[Mark(point.compute, point.loss, words)]))
    return LogLog(
        label=f"{name} against FLOPs of training",
        x_title="FLOPs of training",
        y_title=f"{name}, nats a token",
        x_range=(low, high),
        y_range=(min(losses) / 1.02, max(losses) * 1.02),
        series=series,
        law=[(step, law(step)) for step in steps] if law else (),
    ).html()
