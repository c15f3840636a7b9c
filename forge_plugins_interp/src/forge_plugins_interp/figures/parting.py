"""How the difference of two traces grows, in the order of computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forge_plugins_interp.trace_comparison import Compared

_LEAST = 1e-17
"""Is drawn in the place of 0."""


def parting_figure(compared: Sequence[Compared], tolerance: float) -> Figure:
    """A row of points for each step, coloured by what is compared.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    steps = sorted({one.step for one in compared})
    figure = blank(10, 2.2 * len(steps) + 0.6)
    grid = figure.subplots(len(steps), 1, squeeze=False, sharey=True)[:, 0]
    for axes, step in zip(grid, steps, strict=True):
        of_step = [one for one in compared if one.step == step]
        for kind in dict.fromkeys(one.kind for one in of_step):
            places = [place for place, one in enumerate(of_step) if one.kind == kind]
            heights = [max(of_step[place].difference, _LEAST) for place in places]
            shown = [height if math.isfinite(height) else math.nan for height in heights]
            axes.plot(places, shown, ".", markersize=3, label=kind.replace("_", " "))
        axes.axhline(tolerance, color="0.6", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel(f"step {step}")
    grid[0].legend(fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    grid[-1].set_xlabel("order of computation")
    figure.supylabel("relative difference", fontsize=9)
    return figure
