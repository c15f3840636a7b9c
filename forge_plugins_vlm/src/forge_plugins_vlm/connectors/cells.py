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
