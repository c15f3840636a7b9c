"""Pictures with two logarithmic axes, of few points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import attrs

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 360, 64, 16, 14, 48
_BETWEEN = (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)
"""Ticks of the vertical axis in each power of ten."""
_MOST_TICKS = 12


@attrs.frozen
class Mark:
    """A point. ``x`` and ``y`` are above 0 and finite."""

    x: float
    y: float
    words: str
    """Stand under the pointer."""


@attrs.frozen(kw_only=True)
class Series:
    """Points of one colour."""

    color: int
    """One of the page's ten, from 0; more begin again."""
    marks: Sequence[Mark]
    is_joined: bool = False
    """Whether a line leads from each to the next."""


@attrs.frozen(kw_only=True)
class LogLog:
    """A picture."""

    label: str
    """Says what it shows, to those who do not see it."""
    x_title: str
    y_title: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    series: Sequence[Series]
    law: Sequence[tuple[float, float]] = ()
    """A broken line behind the points."""
    x_ticks: Sequence[float] = ()
    """By default powers of ten, and what lies between."""

    def html(self) -> str:
        """A ``figure``."""
        floor = _HEIGHT - _BOTTOM
        parts = []
        for tick in self.x_ticks or _ticks(*self.x_range, (1, 2, 5)):
            x, text = self._x(tick), f"{tick:g}" if self.x_ticks else f"{tick:.0e}"
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{floor}"/>')
            parts.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{text}</text>')
        for tick in _ticks(*self.y_range, _BETWEEN):
            y = self._y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        parts.append(self._line("cursor", self.law))
        for series in self.series:
            color = f"var(--c{series.color % 10})"
            if series.is_joined:
                parts.append(self._line("curve", [(mark.x, mark.y) for mark in series.marks], f"stroke:{color}"))
            for mark in series.marks:
                place = f'cx="{self._x(mark.x):.1f}" cy="{self._y(mark.y):.1f}" r="5"'
                parts.append(f'<circle {place} style="fill:{color}"><title>{escape(mark.words)}</title></circle>')
        middle = (_LEFT + _WIDTH) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(self.x_title)}</text>')
        parts.append(f'<text transform="rotate(-90 14 {floor / 2})" x="14" y="{floor / 2}" text-anchor="middle">')
        parts.append(f"{escape(self.y_title)}</text>")
        return (
            f'<figure style="max-width:{_WIDTH}px;margin:0 0 1rem"><svg role="img" aria-label="{escape(self.label)}" '
            f'viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</svg></figure>'
        )

    def _line(self, kind: str, points: Sequence[tuple[float, float]], style: str = "") -> str:
        if len(points) < 2:
            return ""
        places = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        return f'<polyline class="{kind}" fill="none" style="{style}" points="{places}"/>'

    def _x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(value / low) / math.log(high / low)

    def _y(self, value: float) -> float:
        low, high = self.y_range
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * math.log(high / value) / math.log(high / low)


def _ticks(low: float, high: float, mantissas: Sequence[float]) -> list[float]:
    """The values between the ends that are a mantissa times a power of ten; of many, those of powers of ten alone."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for some in (mantissas, (1, 2, 5), (1,)):
        found = [m * 10.0**power for power in powers for m in some if low <= m * 10.0**power <= high]
        if found and len(found) <= _MOST_TICKS:
            return found
    return found or [low, high]
