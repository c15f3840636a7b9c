"""Representational similarity analysis (Kriegeskorte et al. 2008).

Each side becomes a matrix of dissimilarities of stimuli (RDM), and these are compared. Shapes: n = stimuli, p =
features, m = n (n − 1) / 2 pairs.
"""

from __future__ import annotations

from typing import Literal

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.matrices import checked

Dissimilarity = Literal["correlation", "cosine", "euclidean", "sqeuclidean"]
Comparison = Literal["spearman", "pearson", "kendall", "cosine"]


def rdm(x: torch.Tensor, kind: Dissimilarity = "correlation") -> torch.Tensor:
    """The dissimilarity of each pair of stimuli, ``(m,)`` float64, in the order of the upper triangle.

    Args:
        x: ``(n, p)``.
        kind: ``correlation`` is 1 minus Pearson's of the two rows, each centred over its features.

    Raises:
        ConfigError: fewer than 3 stimuli; or a stimulus without variance, which has no correlation.
    """
    x, _ = checked(x, x, 3)
    upper = tuple(torch.triu_indices(len(x), len(x), offset=1))
    if kind in ("euclidean", "sqeuclidean"):
        distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")[upper]
        return distances if kind == "euclidean" else distances.square()
    if kind == "correlation":
        x = x - x.mean(1, keepdim=True)
    norms = x.norm(dim=1, keepdim=True)
    if bool((norms == 0).any()):
        constant = int((norms[:, 0] == 0).nonzero()[0])
        raise ConfigError(f"stimulus {constant} has the same value in all features, so that it has no {kind}")
    x = x / norms
    return 1 - (x @ x.T)[upper]


def compare(a: torch.Tensor, b: torch.Tensor, by: Comparison = "spearman") -> float:
    """The similarity of two RDMs ``(m,)``; ``kendall`` is τ-a, which ties lower."""
    if by == "kendall":
        first, second = ((one[:, None] - one[None]).sign() for one in (a, b))
        m = len(a)
        return float((first * second).sum() / (m * (m - 1)))
    if by == "spearman":
        a, b = _ranks(a), _ranks(b)
    if by != "cosine":
        a, b = a - a.mean(), b - b.mean()
    return float(a @ b / (a.norm() * b.norm()))


def rsa(x: torch.Tensor, y: torch.Tensor, *, kind: Dissimilarity = "correlation", by: Comparison = "spearman") -> float:
    """How alike the dissimilarities of two representations ``(n, p)`` and ``(n, q)`` are."""
    x, y = checked(x, y, 3)
    return compare(rdm(x, kind), rdm(y, kind), by)


def noise_ceiling(rdms: torch.Tensor, by: Comparison = "spearman") -> tuple[float, float]:
    """How well any model could do on average over subjects (Nili et al. 2014), a lower and an upper bound.

    Args:
        rdms: ``(subjects, m)``; of at least two subjects.

    Returns:
        The mean similarity of each subject's RDM to the mean of the others', and to the mean of all.
    """
    if len(rdms) < 2:
        raise ConfigError(f"a noise ceiling needs at least 2 subjects, got {len(rdms)}")
    rdms = torch.stack([_ranks(one) for one in rdms]) if by == "spearman" else rdms.double()
    total = rdms.sum(0)
    lower = [compare(one, (total - one) / (len(rdms) - 1), by) for one in rdms]
    upper = [compare(one, total / len(rdms), by) for one in rdms]
    return sum(lower) / len(lower), sum(upper) / len(upper)


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks from 1, ties with their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks: torch.Tensor = (ends - (counts.double() - 1) / 2)[inverse]
    return ranks
