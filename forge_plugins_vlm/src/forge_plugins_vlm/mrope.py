"""Positions in time, rows and columns (M-RoPE; Wang et al. 2024, Qwen2-VL, arXiv 2409.12191, section 2.1).

Shapes: B = batch, S = sequence.
"""

from __future__ import annotations

import torch


def image_axes(
    slots: torch.Tensor, positions: torch.Tensor, grid: torch.Tensor, begun: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each token is in time, row and column. Text has three times its position. The tokens of a tile share the
    time at which it begins, and add their row and their column to it; what follows begins behind the largest of them.

    Args:
        slots: ``image_slots`` ``(B, S)``.
        positions: ``(B or 1, S)`` int64, of a document; −1 at padding.
        grid: ``(B or 1, 2)`` int64, rows and columns of the tokens of a tile.
        begun: ``(B, 1)`` int64, tiles before these tokens, which a cache has.

    Returns:
        ``(B, S, 3)`` int64; and ``(B, 1)``, the tiles that have begun by the end.
    """
    rows, columns = grid[:, :1], grid[:, 1:]
    each = rows * columns
    is_image, within = slots >= 0, slots % each
    first = is_image & (within == 0)
    total = first.cumsum(1)
    place = torch.arange(slots.shape[1], device=slots.device)
    start = (place - positions).expand_as(slots).clamp(min=0, max=slots.shape[1] - 1)  # of the document, if it is here
    tiles = total - (total - first.long()).gather(1, start) + begun
    time = positions - (tiles - is_image.long()) * (each - torch.maximum(rows, columns))
    time = torch.where(is_image, time - within, time)
    row, column = (torch.where(is_image, one, 0) for one in (within // columns, within % columns))
    return torch.stack((time, time + row, time + column), dim=-1), tiles[:, -1:]
