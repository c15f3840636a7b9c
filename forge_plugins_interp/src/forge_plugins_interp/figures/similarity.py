"""A matrix of comparisons as a picture: the first store's sites from bottom to top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

_INCHES = 0.24
"""Of a cell."""


def similarity_figure(values: torch.Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> Figure:
    """
    Args:
        values: ``(rows, columns)``; NaN is left white.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = blank(2.6 + _INCHES * len(columns), 1.9 + _INCHES * len(rows))
    axes = figure.subplots()
    image = axes.imshow(values.numpy(), cmap="magma", origin="lower")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=6)
    axes.set_yticks(range(len(rows)), rows, fontsize=6)
    figure.colorbar(image, ax=axes, label=title, shrink=0.8)
    return figure
