"""Patterns of heads as pictures, a row a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

_MOST_WORDS = 24
"""More are not written at the axes."""


def attention_figure(
    values: Mapping[str, torch.Tensor], heads: Mapping[str, Sequence[int]], words: Sequence[str]
) -> Figure:
    """One picture a head, queries from top to bottom.

    Args:
        values: ``(H, S, T)`` by site.
        heads: the numbers of these heads.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    columns = max(map(len, heads.values()))
    side = 1.2 + 0.12 * min(len(words), _MOST_WORDS)
    figure = blank(side * columns, (side + 0.3) * len(values))
    grid = figure.subplots(len(values), columns, squeeze=False)
    for row, (name, value) in zip(grid, values.items(), strict=True):
        for axes in row[len(value) :]:
            axes.set_visible(False)
        for axes, head, one in zip(row, heads[name], value.float().cpu(), strict=False):
            is_pattern = name.endswith("pattern")
            axes.imshow(one.numpy(), cmap="magma", vmin=0 if is_pattern else None, vmax=1 if is_pattern else None)
            axes.set_title(f"{name} {head}", fontsize=6)
            _label(axes, words)
    return figure


def _label(axes: object, words: Sequence[str]) -> None:
    places = range(len(words)) if len(words) <= _MOST_WORDS else []
    shown = [repr(words[place])[1:-1] for place in places]
    axes.set_xticks(list(places), shown, rotation=90, fontsize=5)  # type: ignore[attr-defined]
    axes.set_yticks(list(places), shown, fontsize=5)  # type: ignore[attr-defined]
