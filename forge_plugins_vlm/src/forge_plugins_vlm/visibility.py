"""Which image tokens a position sees.

Shapes: B = batch, S = sequence, F = image tokens of a row.
"""

from __future__ import annotations

import torch


def sees_images(bounds: torch.Tensor) -> torch.Tensor:
    """Which positions see an image, ``(B, S)`` bool, of ``image_range`` ``(B, S, 3)``."""
    return bounds[..., 2] > bounds[..., 1]


def visible_tokens(bounds: torch.Tensor, tile: torch.Tensor, *, latest: bool) -> torch.Tensor:
    """Which image tokens a position sees, ``(B, S, F)`` bool; all, where it sees none, so that a softmax has numbers.

    Args:
        bounds: ``image_range`` ``(B, S, 3)``.
        tile: ``(F,)`` or ``(B, F)`` int64, of each token; the learned end of a row is beyond all tiles.
        latest: the latest images alone.
    """
    tile = tile if tile.dim() == 1 else tile[:, None]
    first, end = bounds[..., 1 if latest else 0, None], bounds[..., 2, None]
    return ((tile >= first) & (tile < end)) | (end <= bounds[..., 1, None])
