"""The mask of a decoder that reads images in both directions.

Shapes: B = batch, S = sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def image_mask(
    images: Mapping[str, torch.Tensor], document: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor:
    """Which positions see which: all before them, and those of their own image after them; of their own document.

    Args:
        images: ``image_slots`` ``(B, S)`` and ``image_range`` ``(B, S, 3)``.
        document: ``(B, S)`` int64.
        positions: ``(B, S)`` int64, −1 at padding, which nothing else sees; it sees itself, so that no row is
            empty.

    Returns:
        ``(B, 1, S, S)`` bool.
    """
    slots, end = images["image_slots"], images["image_range"][..., 2]
    number = torch.where(slots == -1, -1, end)  # all positions of an image have the tiles of all images up to it
    mask = (number[:, :, None] == number[:, None]) & (number >= 0)[:, None]
    place = torch.arange(slots.shape[1], device=slots.device)
    mask |= place[:, None] >= place
    if document is not None:
        mask &= document[:, :, None] == document[:, None]
    if positions is not None:
        mask &= (positions >= 0)[:, None] | (place[:, None] == place)
    return mask[:, None]
