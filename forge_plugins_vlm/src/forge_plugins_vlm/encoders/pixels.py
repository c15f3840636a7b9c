"""Pixels as encoders read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def normalise(
    pixels: torch.Tensor, mean: Sequence[float], deviation: Sequence[float], dtype: torch.dtype
) -> torch.Tensor:
    """``(N, 3, H, W)`` uint8 to ``(value / 255 − mean) / deviation``, by channel, in fp32 and then cast to ``dtype``.

    The numbers stay on the host: as tensors they would have to be copied to the device in each forward.
    """
    channels = [
        (channel.float() / 255 - mid) / scale
        for channel, mid, scale in zip(pixels.unbind(1), mean, deviation, strict=True)
    ]
    return torch.stack(channels, dim=1).to(dtype)


def picture_cells(sizes: torch.Tensor, cell: int, rows: int, columns: int) -> torch.Tensor:
    """``(N, rows, columns)`` bool: the cells of ``cell`` × ``cell`` pixels that have a pixel of the picture.

    Args:
        sizes: ``(N, 2)`` int64, height and width of the picture, at the upper left of its tile.
    """
    height, width = sizes.unsqueeze(-1).unbind(1)
    in_row = torch.arange(0, rows * cell, cell, device=sizes.device) < height
    in_column = torch.arange(0, columns * cell, cell, device=sizes.device) < width
    return in_row[:, :, None] & in_column[:, None, :]
