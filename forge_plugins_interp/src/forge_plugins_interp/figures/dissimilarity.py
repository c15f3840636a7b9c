"""A matrix of dissimilarities and where it places stimuli."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_plugins_interp.figures.blank import blank

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

_MOST_WORDS = 40
"""More are not written."""


def dissimilarity_figure(rdm: torch.Tensor, labels: Sequence[str]) -> Figure:
    """The ranks of dissimilarities, from 0 to 1, beside the stimuli placed by classical scaling.

    Args:
        rdm: ``(m,)``, as ``metrics.rsa.rdm`` gives it.
        labels: a word for each of the n stimuli.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from forge_plugins_interp.metrics.rsa import ranks, scaled_positions, square

    figure = blank(9, 4.2)
    left, right = figure.subplots(1, 2)
    drawn = left.imshow(square(ranks(rdm) / len(rdm), len(labels)).numpy(), cmap="viridis", vmin=0, vmax=1)
    figure.colorbar(drawn, ax=left, label="rank of the dissimilarity")
    places = range(len(labels)) if len(labels) <= _MOST_WORDS else []
    left.set_xticks(list(places), [labels[place] for place in places], rotation=90, fontsize=6)
    left.set_yticks(list(places), [labels[place] for place in places], fontsize=6)
    positions = scaled_positions(rdm).numpy()
    right.scatter(positions[:, 0], positions[:, 1], s=12)
    for place in places:
        right.annotate(labels[place], positions[place], fontsize=6)
    right.set_aspect("equal", adjustable="datalim")
    right.set_title("classical scaling", fontsize=8)
    return figure
