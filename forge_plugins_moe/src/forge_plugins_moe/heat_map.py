"""The load of experts in colours, and ``experts.html``, one file without scripts. Nothing here imports torch.

A cell's colour is the expert's load over the layer's mean, in powers of two: the darker, the more; white is nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge_core.checkpoint.fsync import write_durably
from forge_plugins_moe.load_history import Loads, read_loads

FILE = "experts.html"
_CELL, _LEFT, _TOP = 16, 200, 20
"""Pixels."""
_RECENT = 0.1
"""Of the logged steps, the part that the first map shows."""
_COLUMNS = 80
"""Of a map over time, at most."""
_LEAST, _MOST = (253, 231, 217), (103, 0, 13)
"""The colours of a quarter of the mean and of four times the mean, and of what is beyond."""
_STYLE = "body{font:14px sans-serif;margin:2em;max-width:72em}text{font:11px sans-serif}h2{margin-top:2em}"


def draw(run_dir: Path) -> Path:
    """Draw a run's ``experts.jsonl``. Returns the file.

    Raises:
        ConfigError: there is nothing in it.
    """
    page = "\n".join(_page(run_dir.name, read_loads(run_dir)))
    path = run_dir / FILE
    write_durably(path, page)
    return path


def latest(loads: Sequence[Loads]) -> Sequence[Loads]:
    """The last tenth of the logged steps."""
    return loads[-max(1, math.ceil(len(loads) * _RECENT)) :]


def load_over_mean(loads: Sequence[Loads]) -> dict[str, list[float]]:
    """By layer: what each expert has had, over the mean of the layer."""
    return {layer: _over_mean(_summed(loads, layer)) for layer in loads[-1].load}


def map_of_layers(means: Mapping[str, Sequence[float]]) -> str:
    """A picture of ``load_over_mean``: a row for each layer, a column for each expert."""
    return _map(means, "expert")


def legend() -> str:
    """A picture of what the colours mean."""
    values = (0, 0.25, 0.5, 0.75, 1, 1.33, 2, 4)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{48 * len(values)}" height="{_CELL}">']
    for place, value in enumerate(values):
        parts.append(_cell(48 * place, 0, value, f"{value}"))
        parts.append(f'<text x="{48 * place + _CELL + 3}" y="{_CELL - 4}">{value}</text>')
    return "".join(parts) + "</svg>"


def _page(name: str, loads: Sequence[Loads]) -> Iterator[str]:
    first, last = loads[0].step, loads[-1].step
    recent = latest(loads)
    title = f"Experts of {html.escape(name)}"
    yield f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>'
    yield "<p>Load over the mean of the layer: " + legend()
    yield f"<h2>Layers and experts, steps {recent[0].step} to {last}</h2>"
    yield map_of_layers(load_over_mean(recent))
    yield f"<h2>Over time, steps {first} to {last}</h2>"
    groups = _in_groups(loads)
    span = f"logged steps from left to right, {len(loads)} in {len(groups)} columns, each with its first step"
    for layer, load in loads[-1].load.items():
        columns = [_over_mean(_summed(group, layer)) for group in groups]
        rows = {f"expert {expert}": [column[expert] for column in columns] for expert in range(len(load))}
        yield f"<h3>{html.escape(layer)}</h3><p>{span}; busiest over mean in the last: {max(columns[-1]):.2f}</p>"
        yield _map(rows, "step", [group[0].step for group in groups])
    pairs = loads[-1].pairs
    if pairs:
        yield f"<h2>Experts that work on the same tokens, step {last}</h2>"
        yield "<p>Of the tokens of a row's expert, the part that visits a column's too, over what chance would give."
    for layer, matrix in pairs.items():
        yield f"<h3>{html.escape(layer)}</h3>"
        yield _map(_over_chance(matrix, loads[-1].load[layer]), "expert")


def _map(rows: Mapping[str, Sequence[float]], column: str, numbers: Sequence[int] = ()) -> str:
    """An SVG; each cell says its row, column and value when it is pointed at. ``numbers`` are those of the columns, by
    default from 0."""
    numbers = numbers or range(max(map(len, rows.values())))
    width = _LEFT + _CELL * (len(numbers) + 3)  # the last number is wider than its column
    size = f'width="{width}" height="{_TOP + _CELL * len(rows)}" style="width:{width}px"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    for place in range(0, len(numbers), 4):
        parts.append(f'<text x="{_LEFT + _CELL * place + 2}" y="{_TOP - 6}">{numbers[place]}</text>')
    for place, (name, values) in enumerate(rows.items()):
        y = _TOP + _CELL * place
        label = html.escape(name)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + _CELL - 4}" text-anchor="end">{label}</text>')
        for at, value in enumerate(values):
            said = f"{label}, {column} {numbers[at]}: {value:.2f}"
            parts.append(_cell(_LEFT + _CELL * at, y, value, said))
    return "".join(parts) + "</svg>"


def _cell(x: int, y: int, value: float, said: str) -> str:
    size = _CELL - 1
    return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{_colour(value)}"><title>{said}</title></rect>'


def _colour(value: float) -> str:
    """White where there is nothing at all."""
    if value <= 0:
        return "#ffffff"
    part = (max(-2.0, min(2.0, math.log2(value))) + 2) / 4
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(_LEAST, _MOST, strict=True))


def _in_groups(loads: Sequence[Loads]) -> list[Sequence[Loads]]:
    size = math.ceil(len(loads) / _COLUMNS)
    return [loads[start : start + size] for start in range(0, len(loads), size)]


def _summed(loads: Sequence[Loads], layer: str) -> list[float]:
    return [sum(counts) for counts in zip(*(one.load[layer] for one in loads), strict=True)]


def _over_mean(load: Sequence[float]) -> list[float]:
    mean = sum(load) / len(load)
    return [one / mean if mean else 0.0 for one in load]


def _over_chance(matrix: Sequence[Sequence[float]], load: Sequence[float]) -> dict[str, list[float]]:
    """A token that visits the row's expert visits ``k − 1`` others; chance shares those out as the load of the others
    is. The diagonal is 1."""
    rows = {}
    for expert, row in enumerate(matrix):
        others = sum(part for other, part in enumerate(row) if other != expert)
        rest = sum(load) - load[expert]
        expected = [others * one / rest if rest else 0.0 for one in load]
        rows[f"expert {expert}"] = [
            1.0 if other == expert else (part / expected[other] if expected[other] else 0.0)
            for other, part in enumerate(row)
        ]
    return rows
