"""Pictures for the notebooks, as SVG: they need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP = 520, 180, 60, 30
COLORS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#888888")
_FRAME = f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'


class Picture:
    """Jupyter shows it."""

    def __init__(self, *shapes: str) -> None:
        size = f'width="{WIDTH + LEFT + 20}" height="{HEIGHT + TOP + 30}"'
        font = 'font-family="sans-serif" font-size="12"'
        self._svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{"".join(shapes)}</svg>'

    def _repr_svg_(self) -> str:
        return self._svg


def heat_map(values: Sequence[Sequence[float]], *, title: str, rows: str, columns: str) -> Picture:
    """Columns from left to right, rows from top to bottom; dark is the largest value."""
    largest = max(max(column) for column in values)
    width, height = WIDTH / len(values), HEIGHT / len(values[0])
    cells = [
        f'<rect x="{LEFT + x * width:.1f}" y="{TOP + y * height:.1f}" width="{width + 0.5:.1f}" height="{height:.1f}" '
        f'fill="rgb({_shade(value / largest)})"/>'
        for x, column in enumerate(values)
        for y, value in enumerate(column)
    ]
    return Picture(*cells, *_words(title, rows, f"{columns} (white is 0, dark {largest:g})"))


def curves(series: Mapping[str, Sequence[float]], *, title: str, x: str, y: str) -> Picture:
    """One line for each series, from 0 up."""
    largest = max(max(values) for values in series.values())
    shapes = [_FRAME]
    for place, (color, (name, values)) in enumerate(zip(COLORS, series.items(), strict=False)):
        step = WIDTH / (len(values) - 1)
        points = " ".join(
            f"{LEFT + i * step:.1f},{TOP + HEIGHT * (1 - value / largest):.1f}" for i, value in enumerate(values)
        )
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        right = LEFT + WIDTH - 80 * (len(series) - 1 - place)
        shapes.append(f'<text x="{right}" y="18" text-anchor="end" fill="{color}">{name}</text>')
    return Picture(*shapes, *_words(title, f"{y} (to {largest:.2g})", x))


def lines(
    series: Mapping[str, Mapping[float, float]], *, title: str, x: str, y: str, log: bool = False, points: bool = False
) -> Picture:
    """One line for each series, of ``y`` by ``x``, from the smallest value to the largest; ``log`` is of the x-axis,
    and ``points`` marks each value.

    Raises:
        ValueError: there are more names than colors.
    """
    scale = math.log if log else float
    at = [one for values in series.values() for one in values]
    low, high = (find(one for values in series.values() for one in values.values()) for find in (min, max))
    left, right = scale(min(at)), scale(max(at))
    shapes = [_FRAME]
    for color, values in zip(COLORS, series.values(), strict=False):
        places = [
            (LEFT + WIDTH * (scale(one) - left) / (right - left), TOP + HEIGHT * (high - value) / (high - low))
            for one, value in values.items()
        ]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        if points:
            shapes += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{color}"/>' for px, py in places]
    ends = [
        f'<text x="{LEFT - 4}" y="{TOP + 10}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{LEFT - 4}" y="{TOP + HEIGHT}" text-anchor="end">{low:.3g}</text>',
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 20}">{min(at):g}</text>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 20}" text-anchor="end">{max(at):g}</text>',
    ]
    return Picture(*shapes, *ends, *_legend(list(series)), *_words(title, y, x))


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]], *, title: str, y: str, limit: tuple[str, float] | None = None
) -> Picture:
    """A bar for each name, from the left, made of its parts, from 0 up; ``limit`` is a dashed line and its words.

    Raises:
        ValueError: there are more names of parts than colors.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    legend = _legend(parts)
    largest = max(*(sum(bar.values()) for bar in bars.values()), limit[1] if limit else 0) * 1.1
    step = WIDTH / len(bars)
    shapes = [_FRAME]
    for place, (name, bar) in enumerate(bars.items()):
        middle, top = LEFT + step * (place + 0.5), float(TOP + HEIGHT)
        for part, value in bar.items():
            height = HEIGHT * value / largest
            top -= height
            box = f'x="{middle - step * 0.3:.1f}" y="{top:.1f}" width="{step * 0.6:.1f}" height="{height:.1f}"'
            shapes.append(f'<rect {box} fill="{COLORS[parts.index(part)]}"/>')
        shapes.append(f'<text x="{middle:.1f}" y="{top - 4:.1f}" text-anchor="middle">{sum(bar.values()):.3g}</text>')
        shapes.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{name}</text>')
    if limit:
        height = TOP + HEIGHT * (1 - limit[1] / largest)
        shapes.append(f'<path d="M{LEFT} {height:.1f}h{WIDTH}" stroke="#000" stroke-dasharray="6 4"/>')
        shapes.append(f'<text x="{LEFT + WIDTH - 4}" y="{height - 4:.1f}" text-anchor="end">{limit[0]}</text>')
    return Picture(*shapes, *legend, *_words(title, y, ""))


def _legend(names: Sequence[str]) -> list[str]:
    """At the right of the title."""
    if len(names) > len(COLORS):
        raise ValueError(f"{len(names)} names, and there are {len(COLORS)} colors: {', '.join(names)}")
    shapes: list[str] = []
    right = float(LEFT + WIDTH)
    for color, name in reversed(list(zip(COLORS, names, strict=False))):
        shapes.append(f'<text x="{right:.0f}" y="18" text-anchor="end" fill="{color}">{name}</text>')
        right -= 6.5 * len(name) + 12
    return shapes


def _shade(share: float) -> str:
    return ",".join(str(round(255 - share * depth)) for depth in (225, 180, 90))


def _words(title: str, left: str, below: str) -> list[str]:
    middle, lowest = TOP + HEIGHT / 2, TOP + HEIGHT + 20
    return [
        f'<text x="{LEFT}" y="18" font-weight="bold">{title}</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{lowest}" text-anchor="middle">{below}</text>',
        f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">{left}</text>',
    ]
