"""What parts of a model add to a number, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 40
"""The largest so many are shown."""


def contributions_figure(parts: Sequence[str], values: Sequence[float], title: str) -> Figure:
    """
    Raises:
        ConfigError: matplotlib is not installed.
    """
    least = sorted(map(abs, values), reverse=True)[:_MOST][-1]
    shown = [(part, value) for part, value in zip(parts, values, strict=True) if abs(value) >= least]
    figure = blank(6, 0.8 + 0.2 * len(shown))
    axes = figure.subplots()
    colours = ["tab:red" if value < 0 else "tab:blue" for _, value in shown]
    axes.barh(range(len(shown)), [value for _, value in shown], color=colours)
    axes.set_yticks(range(len(shown)), [part for part, _ in shown], fontsize=6)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_xlabel(title)
    return figure
