"""Centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414).

It does not change under orthogonal maps, isotropic scales and translations of either side; it does under other linear
maps. Shapes: n = stimuli, p, q = features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch

from forge_plugins_interp.metrics.matrices import centred, checked

LEAST_DEBIASED = 4
"""Stimuli that the unbiased estimate needs."""


def linear_cka(x: torch.Tensor, y: torch.Tensor, *, debiased: bool = True) -> float:
    """CKA with linear kernels.

    Biased: ``‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖)`` of centred matrices. Debiased: by the unbiased HSIC (Song et al. 2012; Nguyen et
    al. 2020, arXiv 2010.15327, equation 3), which is near 0 where there is nothing in common; the biased one is not if
    features are many.

    Args:
        x, y: ``(n, p)`` and ``(n, q)``.

    Returns:
        At most 1; NaN, with a warning, where an unbiased self-similarity is not positive.

    Raises:
        ConfigError: other stimuli, fewer than 4 (debiased) or 2, or a value that is not finite.
    """
    x, y = checked(x, y, LEAST_DEBIASED if debiased else 2)
    x, y = centred(x), centred(y)
    n = len(x)
    if max(x.shape[1], y.shape[1]) >= n:
        return _of_kernels(x @ x.T, y @ y.T, debiased=debiased)
    products = [(b.T @ a).square().sum() for a, b in ((x, y), (x, x), (y, y))]
    if debiased:
        norms_x, norms_y = x.square().sum(1), y.square().sum(1)
        pairs = ((norms_x, norms_y), (norms_x, norms_x), (norms_y, norms_y))
        products = [_debiased(z, a, b) for z, (a, b) in zip(products, pairs, strict=True)]
    return ratio(*(float(one) for one in products))


def rbf_cka(x: torch.Tensor, y: torch.Tensor, *, fraction: float = 1.0, debiased: bool = True) -> float:
    """CKA with kernels ``exp(−‖a − b‖² / 2σ²)``, ``σ² = fraction² · median ‖a − b‖²``. It goes to linear CKA as
    ``fraction`` grows (Alvarez 2021, arXiv 2112.09305). Arguments and errors as in ``linear_cka``."""
    x, y = checked(x, y, LEAST_DEBIASED if debiased else 2)
    return _of_kernels(_rbf(x, fraction), _rbf(y, fraction), debiased=debiased)


def _rbf(x: torch.Tensor, fraction: float) -> torch.Tensor:
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    rows, columns = torch.triu_indices(len(x), len(x), offset=1)
    upper = distances[rows, columns]
    return torch.exp(-distances / (2 * fraction**2 * upper.median()))


def _of_kernels(k: torch.Tensor, other: torch.Tensor, *, debiased: bool) -> float:
    hsic: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = hsic_1 if debiased else hsic_0
    return ratio(*(float(hsic(a, b)) for a, b in ((k, other), (k, k), (other, other))))


def hsic_0(k: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tr(KHLH) / (n − 1)²``, biased.

    Args:
        k, other: kernels ``(n, n)``.
    """
    n = len(k)
    k = k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()
    return (k * other).sum() / (n - 1) ** 2


def hsic_1(k: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The unbiased estimate, with the diagonals left out. Arguments as in ``hsic_0``, of at least 4 stimuli."""
    n = len(k)
    k, other = (one - one.diagonal().diag() for one in (k, other))
    ends = k.sum() * other.sum() / ((n - 1) * (n - 2))
    cross = 2 / (n - 2) * (k.sum(0) @ other.sum(1))
    return ((k * other).sum() + ends - cross) / (n * (n - 3))


def _debiased(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``n (n − 3)`` times ``hsic_1`` of linear kernels, from features: ``a`` and ``b`` are squared norms of rows."""
    n = len(a)
    return product - n / (n - 2) * (a @ b) + a.sum() * b.sum() / ((n - 1) * (n - 2))


def ratio(both: float, first: float, second: float) -> float:
    """CKA from three estimates of HSIC."""
    if first <= 0 or second <= 0:
        warnings.warn("a representation is not similar to itself: too few stimuli for debiased CKA", stacklevel=3)
        return float("nan")
    return both / math.sqrt(first * second)


class MinibatchCKA:
    """Debiased linear CKA in one pass over batches: estimates of HSIC are averaged, and then divided (Nguyen et al.
    2020, arXiv 2010.15327). Each batch has at least 4 stimuli."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._batches = 0

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add a batch ``(b, p)``, ``(b, q)``."""
        x, y = checked(x, y, LEAST_DEBIASED)
        k, other = x @ x.T, y @ y.T
        self._sums += torch.stack([hsic_1(k, other), hsic_1(k, k), hsic_1(other, other)]).cpu()
        self._batches += 1

    def result(self) -> float:
        """The estimate so far."""
        return ratio(*(self._sums / max(self._batches, 1)).tolist())
