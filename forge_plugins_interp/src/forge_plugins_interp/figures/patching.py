"""The effects of patching as a map: sites by places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forge_plugins_interp.tidy_table import Row


def patching_figure(rows: Sequence[Row], by: Sequence[str], words: Sequence[str]) -> Figure:
    """
    Args:
        rows: of ``sweep`` or ``path_sweep``.
        by: the columns that say where, such as ``position``, or ``position`` and ``head``; the first one runs along the
            map, and there is a map for each value of the others.
        words: of the clean prompt, for positions.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    across, *others = by
    maps = list(dict.fromkeys(tuple(row[dim] for dim in others) for row in rows))
    sites = list(dict.fromkeys(row["site"] for row in rows))
    places = list(dict.fromkeys(row[across] for row in rows))
    limit = max(abs(row["effect"]) for row in rows) or 1.0
    figure = blank(2.2 + (0.6 + 0.28 * len(places)) * len(maps), 1.3 + 0.24 * len(sites))
    grid = figure.subplots(1, len(maps), squeeze=False, sharey=True)[0]
    for axes, chosen in zip(grid, maps, strict=True):
        effects = [[float("nan")] * len(places) for _ in sites]
        for row in rows:
            if tuple(row[dim] for dim in others) == chosen:
                effects[sites.index(row["site"])][places.index(row[across])] = row["effect"]
        image = axes.imshow(effects, cmap="RdBu", vmin=-limit, vmax=limit, origin="lower", aspect="auto")
        labels = [repr(words[place])[1:-1] for place in places] if across == "position" else places
        axes.set_xticks(range(len(places)), labels, fontsize=6, rotation=90 if across in ("position", "to") else 0)
        axes.set_yticks(range(len(sites)), sites, fontsize=6)
        axes.set_xlabel(across)
        axes.set_title(", ".join(f"{dim} {one}" for dim, one in zip(others, chosen, strict=True)), fontsize=7)
    figure.colorbar(image, ax=list(grid), label="effect")
    return figure
