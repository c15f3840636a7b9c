"""Representational similarity analysis (Kriegeskorte et al. 2008).

Each side becomes a matrix of dissimilarities of stimuli (RDM), and these are compared. Shapes: n = stimuli, p =
features, m = n (n − 1) / 2 pairs.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import numpy as np
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.matrices import checked

Dissimilarity = Literal["correlation", "cosine", "euclidean", "sqeuclidean"]
Comparison = Literal["spearman", "pearson", "kendall", "cosine"]
_ROUNDING = 1e-12
"""Of dissimilarities, beside the largest."""


def rdm(x: torch.Tensor, kind: Dissimilarity = "correlation") -> torch.Tensor:
    """The dissimilarity of each pair of stimuli, ``(m,)`` float64, in the order of the upper triangle.

    Args:
        x: ``(n, p)``.
        kind: ``correlation`` is 1 minus Pearson's of the two rows, each centred over its features.

    Raises:
        ConfigError: fewer than 3 stimuli; one feature, or a stimulus without variance, which have no correlation.
    """
    x, _ = checked(x, x, 3)
    upper = tuple(torch.triu_indices(len(x), len(x), offset=1))
    if kind in ("euclidean", "sqeuclidean"):
        distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")[upper]
        return distances if kind == "euclidean" else distances.square()
    if kind == "correlation":
        if x.shape[1] == 1:
            raise ConfigError(
                "stimuli are correlated over features, and a representation, recordings or a subject has one alone; "
                "choose another metric or dissimilarity"
            )
        x = x - x[:, :1]  # a mean of equal values may be another one in its last digit
        x = x - x.mean(1, keepdim=True)
    norms = x.norm(dim=1, keepdim=True)
    if bool((norms == 0).any()):
        constant = int((norms[:, 0] == 0).nonzero()[0])
        raise ConfigError(f"stimulus {constant} has the same value in all features, so that it has no {kind}")
    x = x / norms
    # stimuli that are the same have ties in all their pairs, which a last digit would break
    return (1 - (x @ x.T)[upper]).round(decimals=14)


def compare(a: torch.Tensor, b: torch.Tensor, by: Comparison = "spearman") -> float:
    """The similarity of two RDMs ``(m,)``; ``kendall`` is τ-a, which ties lower."""
    if by == "kendall":
        return _tau_a(a.cpu().numpy(), b.cpu().numpy())
    if by == "spearman":
        a, b = ranks(a), ranks(b)
    if by != "cosine":
        a, b = a - a.mean(), b - b.mean()
    return float(a @ b / (a.norm() * b.norm()))


def rsa(x: torch.Tensor, y: torch.Tensor, *, kind: Dissimilarity = "correlation", by: Comparison = "spearman") -> float:
    """How alike the dissimilarities of two representations ``(n, p)`` and ``(n, q)`` are; NaN, with a warning, where
    those of one are all the same."""
    x, y = checked(x, y, 3)
    a, b = rdm(x, kind), rdm(y, kind)
    return compare(a, b, by) if vary(a, b) else math.nan


def vary(*rdms: torch.Tensor) -> bool:
    """Return whether each RDM ``(m,)`` has different dissimilarities; if not, warn, as nothing is like such a one."""
    differ = all(bool((one - one[0]).abs().max() > _ROUNDING * one.abs().max()) for one in rdms)
    if not differ:
        warnings.warn("all dissimilarities of a representation are the same, so that it is like no other", stacklevel=3)
    return differ


def noise_ceiling(rdms: torch.Tensor, by: Comparison = "spearman") -> tuple[float, float]:
    """How well any model could do on average over subjects (Nili et al. 2014), a lower and an upper bound.

    Args:
        rdms: ``(subjects, m)``; of at least two subjects.

    Returns:
        The mean similarity of each subject's RDM to the mean of the others', and to the mean of all. Means are of what
        the comparison sees: of ranks, or of RDMs of one norm.
    """
    if len(rdms) < 2:
        raise ConfigError(f"a noise ceiling needs at least 2 subjects, got {len(rdms)}")
    rdms = torch.stack([ranks(one) for one in rdms]) if by in ("spearman", "kendall") else rdms.double()
    if by in ("pearson", "cosine"):  # the nearest to all is else that of the subject with the largest values
        rdms = rdms if by == "cosine" else rdms - rdms.mean(1, keepdim=True)
        rdms = rdms / rdms.norm(dim=1, keepdim=True)
    total = rdms.sum(0)
    lower = [compare(one, (total - one) / (len(rdms) - 1), by) for one in rdms]
    upper = [compare(one, total / len(rdms), by) for one in rdms]
    return sum(lower) / len(lower), sum(upper) / len(upper)


def bootstrap(
    model: torch.Tensor, subjects: torch.Tensor, by: Comparison = "spearman", *, samples: int = 1000, seed: int = 0
) -> torch.Tensor:
    """The similarity of a model to subjects over bootstrap samples of stimuli and subjects, ``(samples,)`` float64.

    A stimulus that is drawn twice makes a pair with itself, which is left out (Nili et al. 2014; Schütt et al. 2023).
    Of one subject only stimuli are drawn.

    Args:
        model: an RDM ``(m,)``.
        subjects: ``(subjects, m)``.

    Returns:
        The mean over the subjects that are drawn; NaN of a sample in which no dissimilarity varies.
    """
    n = _stimuli(model)
    whole = torch.stack([square(one, n) for one in (model, *subjects)])
    generator = torch.Generator().manual_seed(seed)
    upper = tuple(torch.triu_indices(n, n, offset=1))
    found = torch.empty(samples, dtype=torch.float64)
    for number in range(samples):
        stimuli = torch.randint(n, (n,), generator=generator)
        drawn = torch.randint(len(subjects), (len(subjects),), generator=generator)
        first, second = stimuli[upper[0]], stimuli[upper[1]]
        kept = first != second
        rdms = whole[:, first[kept], second[kept]]
        each = [compare(rdms[0], one, by) for one in rdms[1:]]
        found[number] = torch.tensor(each, dtype=torch.float64)[drawn].mean()
    return found


def permutations(
    model: torch.Tensor, subjects: torch.Tensor, by: Comparison = "spearman", *, samples: int = 1000, seed: int = 0
) -> torch.Tensor:
    """The mean similarity to subjects after the model's stimuli have changed their labels, ``(samples,)`` float64: how
    alike RDMs of unrelated stimuli are. Arguments as in ``bootstrap``."""
    n = _stimuli(model)
    whole, upper = square(model, n), tuple(torch.triu_indices(n, n, offset=1))
    generator = torch.Generator().manual_seed(seed)
    found = torch.empty(samples, dtype=torch.float64)
    for number in range(samples):
        order = torch.randperm(n, generator=generator)
        shuffled = whole[order[upper[0]], order[upper[1]]]
        found[number] = sum(compare(shuffled, one, by) for one in subjects) / len(subjects)
    return found


def crossnobis(values: torch.Tensor, precision: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-validated squared Mahalanobis distances of stimuli, ``(m,)`` float64: unbiased, so that noise alone is 0 on
    average, and may be negative (Walther et al. 2016).

    ``d_ij = (x_i − x_j)ᵀ P (x'_i − x'_j) / p``, the mean over pairs of different repetitions.

    Args:
        values: ``(repetitions, n, p)``.
        precision: ``(p, p)``, of the noise (``noise_precision``); by default the identity.

    Raises:
        ConfigError: fewer than 2 repetitions, or 3 stimuli.
    """
    repetitions, n, p = values.shape
    if repetitions < 2 or n < 3:
        raise ConfigError(
            f"crossnobis distances need at least 2 repetitions of 3 stimuli, and there are {repetitions} of {n}"
        )
    values = values.double()
    whitened = values if precision is None else values @ precision.double()
    # the sum over pairs of repetitions is that over all, less each with itself
    total = whitened.sum(0) @ values.sum(0).T - torch.einsum("rip,rjp->ij", whitened, values)
    squares = total.diagonal()
    upper = tuple(torch.triu_indices(n, n, offset=1))
    distances = squares[:, None] + squares[None] - total - total.T
    return distances[upper] / (p * repetitions * (repetitions - 1))


def noise_precision(values: torch.Tensor) -> torch.Tensor:
    """The inverse covariance ``(p, p)`` float64 of what repetitions of a stimulus differ by, shrunk towards a multiple
    of the identity (Ledoit and Wolf 2004), so that it exists for any number of features.

    Args:
        values: ``(repetitions, n, p)``, of at least 2 repetitions.
    """
    residuals = (values.double() - values.double().mean(0)).flatten(0, 1)
    covariance, p = residuals.T @ residuals / len(residuals), residuals.shape[1]
    scale = covariance.trace() / p
    spread = (covariance - scale * torch.eye(p, dtype=torch.float64)).square().sum()
    # the squared distance of each residual's outer product from the covariance, on average
    error = (residuals.square().sum(1).square().mean() - covariance.square().sum()) / len(residuals)
    share = (error / spread).clamp(0, 1) if spread > 0 else torch.ones((), dtype=torch.float64)
    shrunk = (1 - share) * covariance + share * scale * torch.eye(p, dtype=torch.float64)
    # repetitions lose one degree of freedom to their mean
    inverse: torch.Tensor = torch.linalg.inv(shrunk) * (len(values) - 1) / len(values)
    return inverse


def scaled_positions(distances: torch.Tensor, dims: int = 2) -> torch.Tensor:
    """Positions ``(n, dims)`` whose distances are near those of an RDM ``(m,)``: classical scaling (Torgerson 1952)."""
    n = _stimuli(distances)
    squares = square(distances, n).square()
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    values, vectors = torch.linalg.eigh(-centre @ squares @ centre / 2)
    chosen = values[-dims:].flip(0).clamp(min=0).sqrt()
    positions: torch.Tensor = vectors[:, -dims:].flip(1) * chosen
    return positions


def _tau_a(a: np.ndarray, b: np.ndarray) -> float:
    """Concordant pairs less discordant ones, over all pairs, in O(m log² m) time and O(m) memory (Knight 1966)."""
    order = np.lexsort((b, a))
    a, b = a[order], np.unique(b[order], return_inverse=True)[1]
    tied_a, tied_b = _tied(a), _tied(b)
    tied_both = _tied(np.unique(np.stack([np.unique(a, return_inverse=True)[1], b]), axis=1, return_inverse=True)[1])
    pairs = len(a) * (len(a) - 1) // 2
    return (pairs - tied_a - tied_b + tied_both - 2 * _inversions(b)) / pairs


def _tied(values: np.ndarray) -> int:
    """Pairs that are equal."""
    counts = np.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _inversions(values: np.ndarray) -> int:
    """Pairs of which the first one is larger, by merging blocks that double, all blocks at once."""
    m, width, found = len(values), 1, 0
    place = np.arange(m)
    while width < m:
        block = place // (2 * width)
        order = np.lexsort((place, values, block))  # equal ones: the left half first, which is no inversion
        is_left = place[order] // width % 2 == 0
        before = np.cumsum(is_left)
        # of each block, how many of its left half have passed at its end
        ends = np.searchsorted(block[order], block[order], side="right") - 1
        found += int((before[ends] - before)[~is_left].sum())
        width *= 2
    return found


def _stimuli(rdm: torch.Tensor) -> int:
    """How many stimuli an RDM ``(m,)`` is of."""
    return (1 + math.isqrt(1 + 8 * len(rdm))) // 2


def square(rdm: torch.Tensor, n: int) -> torch.Tensor:
    """An RDM ``(m,)`` as ``(n, n)`` float64, with zeros on the diagonal."""
    whole = torch.zeros(n, n, dtype=torch.float64)
    whole[tuple(torch.triu_indices(n, n, offset=1))] = rdm.double()
    return whole + whole.T


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks from 1, ties with their mean rank, float64."""
    array = values.cpu().numpy()
    places = array.argsort()  # NumPy's is several times as fast as torch's on a CPU
    ordered = array[places]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(starts, append=len(array))
    found = np.empty(len(array))
    found[places] = np.repeat(starts + (counts + 1) / 2, counts)
    return torch.from_numpy(found)
