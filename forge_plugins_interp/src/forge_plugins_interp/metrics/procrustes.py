"""Procrustes distances: what is left after the best rotation (Williams et al. 2021, arXiv 2110.14739)."""

from __future__ import annotations

import math

import torch

from forge_plugins_interp.metrics.matrices import centred, checked, varies


def procrustes(x: torch.Tensor, y: torch.Tensor) -> float:
    """The squared distance ``‖X‖² + ‖Y‖² − 2 ‖XᵀY‖_*`` of centred matrices of norm 1: 0 for the same shape, at most 2.

    It does not change under orthogonal maps, isotropic scales and translations. It is NaN, with a warning, where the
    stimuli of a side are all the same.

    Args:
        x, y: ``(n, p)`` and ``(n, q)``.
    """
    return 2 - 2 * _overlap(x, y)


def angular_procrustes(x: torch.Tensor, y: torch.Tensor) -> float:
    """The angle ``arccos ‖XᵀY‖_*`` in radians, 0 to π / 2, which is a metric."""
    return float(torch.arccos(torch.tensor(_overlap(x, y), dtype=torch.float64).clamp(max=1)))


def _overlap(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = checked(x, y)
    if not varies(x, y):
        return math.nan
    x, y = centred(x), centred(y)
    return float(torch.linalg.svdvals((x / x.norm()).T @ (y / y.norm())).sum())
