"""Image tokens among the embeddings of text.

Shapes: B = batch, S = sequence, D = width of the residual stream, F = image tokens of a row.
"""

from __future__ import annotations

import torch
from torch import nn

from forge_plugins_vlm.contracts.image_processor import NEWLINE


class Placing(nn.Module):
    """Puts image tokens in the place of the embeddings of their positions."""

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor, *, image_tokens: torch.Tensor) -> torch.Tensor:
        """Place.

        Args:
            hidden: ``(B, S, D)``.
            slots: ``(B, S)`` int64, ``image_slots`` of the batch.
            image_tokens: ``(B, F, D)``; the last one is the learned end of a row, where the model has one.
        """
        last = image_tokens.shape[1] - 1
        index = torch.where(slots == NEWLINE, last, slots.clamp(min=0))
        placed = image_tokens.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))
        return torch.where((slots == -1)[..., None], hidden, placed.to(hidden.dtype))
