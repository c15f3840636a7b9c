"""Centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414).

It does not change under orthogonal maps, isotropic scales and translations of either side; it does under other linear
maps. Shapes: n = stimuli, p, q = features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, product

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.config import LEAST_DEBIASED
from forge_plugins_interp.metrics.matrices import centred, checked

_NOT_SIMILAR = "a representation is not similar to itself: its stimuli are the same, or too few {} for debiased CKA"
_BLOCK_BYTES = 256 * 2**20
"""Of the rows of all kernels that are in memory at a time."""


def linear_cka(x: torch.Tensor, y: torch.Tensor, *, debiased: bool = True, sampled_features: bool = False) -> float:
    """CKA with linear kernels.

    Biased: ``‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖)`` of centred matrices. Debiased: by the unbiased HSIC (Song et al. 2012; Nguyen et
    al. 2020, arXiv 2010.15327, equation 3), which is near 0 where there is nothing in common; the biased one is not if
    features are many.

    Args:
        x, y: ``(n, p)`` and ``(n, q)``.
        sampled_features: as in ``LinearCKA``.

    Returns:
        At most 1, but for noise with ``sampled_features``; NaN, with a warning, where an unbiased self-similarity is
        not positive.

    Raises:
        ConfigError: other stimuli, fewer than 4 (debiased) or 2, or a value that is not finite.
    """
    both = LinearCKA(debiased=debiased, sampled_features=sampled_features)
    both.update([x], [y])
    return float(both.result())


class LinearCKA:
    """Linear CKA of each of some representations with each of others, in one pass over batches of stimuli.

    Of several batches, the estimates of HSIC are averaged, and then divided (Nguyen et al. 2020, arXiv 2010.15327).

    Args:
        debiased: by the unbiased HSIC, which needs 4 stimuli a batch.
        sampled_features: features are a sample, such as neurons of an area, and CKA is that of all there are. HSIC is
            the mean over pairs of features, one of each side; of a representation with itself, pairs of a feature with
            itself are too many, and are left out (Chun et al. 2025, arXiv 2502.15104). It needs ``debiased``. Features
            of different representations are samples that do not depend on each other.
    """

    def __init__(self, *, debiased: bool = True, sampled_features: bool = False) -> None:
        assert debiased or not sampled_features, "it is an unbiased estimate"
        self._debiased, self._sampled_features = debiased, sampled_features
        self._sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def update(self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor] | None = None) -> None:
        """Add a batch.

        Args:
            xs: ``(b, p)`` each, with p of its own.
            ys: the others; without them, ``xs`` again.
        """
        least = LEAST_DEBIASED if self._debiased else 2
        every = [centred(checked(xs[0], one, least)[1]) for one in (*xs, *(ys or ()))]
        products = _products(every, len(xs) if ys is not None else None)
        if self._debiased:
            norms = torch.stack([one.square().sum(1) for one in every])
            products = _without_bias(products, norms)
        if self._sampled_features:
            for number, one in enumerate(every):
                products[number, number] = _of_sampled(one, products[number, number])
        first, second = (slice(len(xs)), slice(len(xs), None)) if ys is not None else (slice(None), slice(None))
        own = products.diagonal()
        batch = products[first, second], own[first], own[second]
        self._sums = batch if self._sums is None else tuple(map(torch.add, self._sums, batch))  # type: ignore[assignment]

    def result(self) -> torch.Tensor:
        """``(len(xs), len(ys))`` float64; NaN, with a warning, where a self-similarity is not positive."""
        assert self._sums is not None, "there was no batch"
        both, first, second = self._sums
        if bool((first <= 0).any() or (second <= 0).any()):
            few = "stimuli or features" if self._sampled_features else "stimuli"
            warnings.warn(_NOT_SIMILAR.format(few), stacklevel=2)
        return both / (first.where(first > 0, math.nan)[:, None] * second.where(second > 0, math.nan)).sqrt()


def _products(every: Sequence[torch.Tensor], n_first: int | None) -> torch.Tensor:
    """``‖YᵀX‖²`` of each pair and of each with itself, by features or by stimuli, as takes fewer operations.

    Args:
        every: centred.
        n_first: so many are compared with the rest; ``None`` compares each with each.
    """
    n, wanted = len(every[0]), _pairs(len(every), n_first)
    by_features = sum(every[i].shape[1] * every[j].shape[1] for i, j in wanted)
    by_stimuli = (sum(one.shape[1] for one in every) + len(every) ** 2 / 2) * n / 2
    found = every[0].new_zeros(len(every), len(every))
    if by_features > by_stimuli:
        return _by_stimuli(every)
    for i, j in wanted:
        found[i, j] = found[j, i] = (every[j].T @ every[i]).square().sum()
    return found


def _pairs(number: int, n_first: int | None) -> list[tuple[int, int]]:
    if n_first is None:
        return list(combinations_with_replacement(range(number), 2))
    return [*product(range(n_first), range(n_first, number)), *((i, i) for i in range(number))]


def _by_stimuli(every: Sequence[torch.Tensor]) -> torch.Tensor:
    """``tr(KL)`` of all pairs, from blocks of rows of all kernels at a time. A kernel is symmetric: what is right of
    the diagonal block counts twice."""
    n = len(every[0])
    rows = max(1, min(n, _BLOCK_BYTES // (8 * n * len(every))))
    found = every[0].new_zeros(len(every), len(every))
    for start in range(0, n, rows):
        block = torch.stack([one[start : start + rows] @ one[start:].T for one in every])
        block[:, :, rows:] *= math.sqrt(2)
        flat = block.flatten(1)
        found += flat @ flat.T
    return found


def _without_bias(products: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """``hsic_1`` of linear kernels, from ``‖YᵀX‖²`` of centred features and their rows' squared norms ``(L, n)``."""
    n = norms.shape[1]
    sums = norms.sum(1)
    ends = sums[:, None] * sums / ((n - 1) * (n - 2))
    return (products - n / (n - 2) * (norms @ norms.T) + ends) / (n * (n - 3))


def _of_sampled(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """``hsic_1`` of a linear kernel with itself, without pairs of a feature with itself, as of equally many pairs.

    Args:
        x: centred, ``(n, p)``.
        own: with all pairs.
    """
    n, p = x.shape
    if p < 2:
        raise ConfigError("sampled_features: needs at least 2 features of each representation, and one has 1")
    squares = x.square()
    sums = squares.sum(0).square()
    of_features = (sums - n / (n - 2) * squares.square().sum(0) + sums / ((n - 1) * (n - 2))) / (n * (n - 3))
    return (own - of_features.sum()) * p / (p - 1)


def rbf_cka(x: torch.Tensor, y: torch.Tensor, *, fraction: float = 1.0, debiased: bool = True) -> float:
    """CKA with kernels ``exp(−‖a − b‖² / 2σ²)``, ``σ² = fraction² · median ‖a − b‖²`` over pairs of different stimuli
    (the code of Kornblith et al. also counts each with itself, at 0). It goes to linear CKA as ``fraction`` grows
    (Alvarez 2021, arXiv 2112.09305). Arguments and errors as in ``linear_cka``."""
    x, y = checked(x, y, LEAST_DEBIASED if debiased else 2)
    return _of_kernels(_rbf(x, fraction), _rbf(y, fraction), debiased=debiased)


def _rbf(x: torch.Tensor, fraction: float) -> torch.Tensor:
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    rows, columns = torch.triu_indices(len(x), len(x), offset=1)
    upper = distances[rows, columns]
    # torch's median of an even number is the lower one of two
    median = (upper.median() - (-upper).median()) / 2
    return torch.exp(-distances / (2 * fraction**2 * median))


def _of_kernels(k: torch.Tensor, other: torch.Tensor, *, debiased: bool) -> float:
    hsic: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = hsic_1 if debiased else hsic_0
    return _ratio(*(float(hsic(a, b)) for a, b in ((k, other), (k, k), (other, other))))


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


def _ratio(both: float, first: float, second: float) -> float:
    """CKA from three estimates of HSIC."""
    if not (first > 0 and second > 0):  # a kernel without a width has NaN
        warnings.warn(_NOT_SIMILAR.format("stimuli"), stacklevel=3)
        return float("nan")
    return both / math.sqrt(first * second)
