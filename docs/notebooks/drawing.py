"""Pictures for the notebooks, as SVG: they need no plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP = 520, 180, 60, 30
COLORS = ("#3366cc", "#dc3912", "#109618", "#ff9900")


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
    shapes = [f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    for place, (color, (name, values)) in enumerate(zip(COLORS, series.items(), strict=False)):
        step = WIDTH / (len(values) - 1)
        points = " ".join(
            f"{LEFT + i * step:.1f},{TOP + HEIGHT * (1 - value / largest):.1f}" for i, value in enumerate(values)
        )
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        right = LEFT + WIDTH - 80 * (len(series) - 1 - place)
        shapes.append(f'<text x="{right}" y="18" text-anchor="end" fill="{color}">{name}</text>')
    return Picture(*shapes, *_words(title, f"{y} (to {largest:.2g})", x))


def _shade(share: float) -> str:
    return ",".join(str(round(255 - share * depth)) for depth in (225, 180, 90))


def _words(title: str, left: str, below: str) -> list[str]:
    middle, lowest = TOP + HEIGHT / 2, TOP + HEIGHT + 20
    return [
        f'<text x="{LEFT}" y="18" font-weight="bold">{title}</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{lowest}" text-anchor="middle">{below}</text>',
        f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">{left}</text>',
    ]
