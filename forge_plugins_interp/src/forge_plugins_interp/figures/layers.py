"""Scores of layers as a curve, with intervals and a ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forge_plugins_interp.tidy_table import Row


def layers_figure(rows: Sequence[Row], title: str) -> Figure:
    """
    Args:
        rows: ``site``, ``score``, ``low``, ``high`` and ``ceiling``, the last three perhaps ``None``; where they have
            them, ``ceiling_low`` and ``ceiling_high`` are drawn as a band, ``null_high`` and ``control`` as lines.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = blank(2.5 + 0.35 * len(rows), 3.6)
    axes = figure.subplots()
    places = range(len(rows))
    axes.plot(places, [row["score"] for row in rows], "o-", color="tab:blue", markersize=4)
    if all(row["low"] is not None for row in rows):
        axes.fill_between(
            places,
            [row["low"] for row in rows],
            [row["high"] for row in rows],
            color="tab:blue",
            alpha=0.2,
            linewidth=0,
        )
    if rows[0]["ceiling"] is not None:
        axes.axhline(rows[0]["ceiling"], color="0.4", linestyle="--", linewidth=1, label="ceiling")
        if rows[0].get("ceiling_low") is not None:
            axes.axhspan(rows[0]["ceiling_low"], rows[0]["ceiling_high"], color="0.4", alpha=0.15, linewidth=0)
    for name, words in (("null_high", "95 % of the null"), ("control", "control task")):
        if all(row.get(name) is not None for row in rows):
            axes.plot(places, [row[name] for row in rows], ":", color="tab:orange", linewidth=1, label=words)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)
    axes.set_xticks(places, [row["site"] for row in rows], rotation=90, fontsize=6)
    axes.set_ylabel(title)
    return figure
