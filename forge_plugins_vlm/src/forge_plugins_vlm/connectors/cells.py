"""Features of a tile as a grid."""

from __future__ import annotations

import torch

from forge_plugins_vlm.contracts.vision_encoder import Grid


def as_cells(features: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``(N, R · C, D)``, row by row, as ``(N, R, C, D)``.

    Raises:
        ValueError: their number is not that of the grid.
    """
    rows, columns = grid
    if features.shape[1] != rows * columns:
        raise ValueError(f"{features.shape[1]} features are no grid of {rows} × {columns} = {rows * columns}")
    return features.reshape(features.shape[0], rows, columns, -1)


def squares(cells: torch.Tensor, side: int) -> torch.Tensor:
    """``(N, R, C, D)`` to ``(N, R / side · C / side, side², D)``: the cells of each square, both row by row."""
    n, rows, columns, width = cells.shape
    cut = cells.reshape(n, rows // side, side, columns // side, side, width).transpose(2, 3)
    return cut.reshape(n, (rows // side) * (columns // side), side**2, width)
