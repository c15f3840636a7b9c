"""Canonical correlations: SVCCA and PWCCA.

Raghu et al. 2017 (arXiv 1706.05806), Morcos et al. 2018 (arXiv 1806.05759). They do not change under invertible linear
maps of either side. Shapes: n = stimuli, p, q = features.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.matrices import centred, checked, varies

_FEW = 10
"""Below so many stimuli a feature, correlations come out too high."""


def canonical_correlations(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``(min(p, q),)`` float64, from the largest to the smallest, each in [0, 1]; NaN, with a warning, where the
    stimuli of a side are all the same.

    Raises:
        ConfigError: not more stimuli than features, other stimuli, or a value that is not finite.
    """
    x, y = checked(x, y)
    _refuse_few(x, y)
    if not varies(x, y):
        return x.new_full((1,), math.nan)
    found: torch.Tensor = torch.linalg.svdvals(_basis(x).T @ _basis(y)).clamp(max=1)
    return found


def mean_cca(x: torch.Tensor, y: torch.Tensor) -> float:
    """The mean canonical correlation. Errors as in ``canonical_correlations``."""
    return float(canonical_correlations(x, y).mean())


def svcca(
    x: torch.Tensor, y: torch.Tensor, *, threshold: float = 0.99, basis: Literal["variance", "sum"] = "variance"
) -> float:
    """The mean canonical correlation of the leading singular directions, as many as first reach ``threshold``.

    Args:
        basis: the threshold is on squared singular values, or on singular values (the paper's formula).
    """
    x, y = checked(x, y)
    if not varies(x, y):
        return math.nan
    return mean_cca(_leading(x, threshold, basis), _leading(y, threshold, basis))


def pwcca(x: torch.Tensor, y: torch.Tensor) -> float:
    """Correlations, each weighted by how much of ``x`` its direction explains, ``α_i ∝ Σ_j |⟨h_i, x_j⟩|``. It is not
    symmetric."""
    x, y = checked(x, y)
    _refuse_few(x, y)
    if not varies(x, y):
        return math.nan
    q_x, q_y = _basis(x), _basis(y)
    u, correlations, _ = torch.linalg.svd(q_x.T @ q_y, full_matrices=False)
    weights = ((q_x @ u).T @ centred(x)).abs().sum(1)
    return float((weights * correlations.clamp(max=1)).sum() / weights.sum())


def _basis(x: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the centred features, ``(n, rank)``."""
    u: torch.Tensor
    u, values, _ = torch.linalg.svd(centred(x), full_matrices=False)
    rank = int((values > values[0] * max(x.shape) * torch.finfo(torch.float64).eps).sum())
    return u[:, :rank]


def _leading(x: torch.Tensor, threshold: float, basis: str) -> torch.Tensor:
    u: torch.Tensor
    values: torch.Tensor
    u, values, _ = torch.linalg.svd(centred(x), full_matrices=False)
    share = values**2 if basis == "variance" else values
    cumulative = share.cumsum(0) / share.sum()
    kept = min(int((cumulative < threshold).sum()) + 1, len(values))
    return u[:, :kept] * values[:kept]


def _refuse_few(x: torch.Tensor, y: torch.Tensor) -> None:
    n, features = len(x), max(x.shape[1], y.shape[1])
    if n <= features:
        raise ConfigError(f"canonical correlations need more stimuli than features; there are {n}, and {features}")
    if n < _FEW * features:
        warnings.warn(f"{n} stimuli are few for {features} features: correlations come out too high", stacklevel=3)
