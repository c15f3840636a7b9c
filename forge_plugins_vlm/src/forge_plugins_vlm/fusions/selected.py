"""Positions of one modality.

Shapes: B = batch, S = sequence, D = width of the residual stream.
"""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.observation import Site
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.block import STREAM


class Selected(nn.Module):
    """Keeps what a layer gives at some positions, and zeros elsewhere."""

    def forward(self, update: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """``(B, S, D)`` and ``(B, S)`` bool to ``(B, S, D)``."""
        return torch.where(kept[..., None], update, 0.0)


def selected_sites(name: str, modules: str) -> dict[str, Site]:
    """``text.<name>`` and ``image.<name>``, which are zero at positions of the other modality: what the modules
    ``<modules>_text`` and ``<modules>_image``, both ``Selected``, give."""
    return {f"{half}.{name}": Site(module=f"{modules}_{half}", dims=STREAM) for half in ("text", "image")}


def is_image(surroundings: BlockInputs) -> torch.Tensor:
    """Which positions are of images, ``(B, S)`` bool."""
    return surroundings.facts["image_slots"] != -1


def limited(surroundings: BlockInputs, kept: torch.Tensor) -> BlockInputs:
    """The same for positions of one modality, ``(B, S)`` bool; feed-forward layers neither route nor count others."""
    return surroundings.of_tokens(kept if surroundings.valid is None else surroundings.valid & kept)
