"""Encoding: how well recordings are predicted from features, on stimuli that were held out (Schrimpf et al. 2018).

Shapes: n = stimuli, p = features, q = neuroids, r = repetitions.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.matrices import checked
from forge_plugins_interp.neuro.regression import Fit

LEAST = 10
"""Stimuli."""
_RESAMPLES = 500


@attrs.frozen(kw_only=True)
class Splits:
    """Training and test stimuli."""

    number: int = 10
    test: float = 0.1
    """The share of stimuli, or of groups."""
    seed: int = 0

    def of(self, n: int, groups: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Numbers of training and of test stimuli. No group is in both.

        Raises:
            ConfigError: there are too few stimuli, or fewer than two groups.
        """
        if n < LEAST:
            raise ConfigError(f"an encoding score needs at least {LEAST} stimuli, and there are {n}")
        names = np.arange(n) if groups is None else groups
        unique = np.unique(names)
        if len(unique) < 2:
            raise ConfigError(f"all stimuli are of the group {str(unique[0])!r}, so that none can be held out")
        rng = np.random.default_rng(self.seed)
        n_test = max(1 if groups is not None else 2, round(self.test * len(unique)))
        for _ in range(self.number):
            is_test = np.isin(names, rng.permutation(unique)[:n_test])
            yield np.flatnonzero(~is_test), np.flatnonzero(is_test)


@attrs.frozen
class EncodingScore:
    """A score, with what it is to be measured by."""

    score: float
    """Pearson's r of each neuroid on held-out stimuli: the median over neuroids, and the mean over splits."""
    low: float
    high: float
    """The 95 % interval of a bootstrap over held-out stimuli."""
    of_neuroids: torch.Tensor
    """``(q,)``, the mean over splits."""
    ceiling: float | None = None
    """What the noise of the recordings leaves to be explained, as r; ``None`` without repetitions."""
    null: tuple[float, ...] = ()
    """Scores for shuffled stimuli."""

    @property
    def normalised(self) -> float | None:
        """``score / ceiling``."""
        return None if self.ceiling is None else self.score / self.ceiling

    @property
    def p_value(self) -> float | None:
        """The share of shuffled scores that are as high, the score itself counted."""
        if not self.null:
            return None
        return (1 + sum(one >= self.score for one in self.null)) / (1 + len(self.null))


def encode(
    x: torch.Tensor,
    repetitions: torch.Tensor,
    fit: Fit,
    *,
    splits: Splits | None = None,
    groups: np.ndarray | None = None,
    shuffles: int = 0,
) -> EncodingScore:
    """The encoding score of features for recordings.

    Args:
        x: ``(n, p)``.
        repetitions: ``(n, r, q)``; their mean is predicted.
        groups: ``(n,)``, which are not split.
        shuffles: how many times stimuli are shuffled for the null distribution.

    Raises:
        ConfigError: too few stimuli, other numbers of them, or a value that is not finite.
    """
    splits = splits or Splits()
    x, y = checked(x, repetitions.mean(1), LEAST)
    parts = [(test, fit(x[train], y[train])(x[test])) for train, test in splits.of(len(x), groups)]
    each = torch.stack([correlations(y[test], predicted) for test, predicted in parts])
    low, high = _interval(y, parts, splits.seed)
    rng = np.random.default_rng(splits.seed + 1)
    null = []
    for _ in range(shuffles):
        other = y[torch.from_numpy(rng.permutation(len(y)))]
        scores = [
            correlations(other[test], fit(x[train], other[train])(x[test])).nanmedian()
            for train, test in splits.of(len(x), groups)
        ]
        null.append(float(torch.stack(scores).mean()))
    ceiling = noise_ceiling(repetitions, seed=splits.seed) if repetitions.shape[1] > 1 else None
    score = float(each.nanmedian(1).values.mean())
    return EncodingScore(score, low, high, each.nanmean(0), ceiling, tuple(null))


def correlations(y: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """Pearson's r of each column, ``(q,)``; NaN where one is constant."""
    y, predicted = y - y.mean(0), predicted - predicted.mean(0)
    found: torch.Tensor = (y * predicted).sum(0) / (y.norm(dim=0) * predicted.norm(dim=0))
    return found


def noise_ceiling(repetitions: torch.Tensor, *, halvings: int = 20, seed: int = 0) -> float:
    """The reliability of the mean over repetitions: Pearson's r of random halves over stimuli, corrected for the length
    by Spearman–Brown, ``2r / (1 + r)``; the median over neuroids, the mean over halvings.

    Args:
        repetitions: ``(n, r, q)``, r at least 2.
    """
    r = repetitions.shape[1]
    if r < 2:
        raise ConfigError(f"a ceiling needs at least 2 repetitions of each stimulus, and there is {r}")
    rng, found = np.random.default_rng(seed), []
    for _ in range(halvings):
        order = rng.permutation(r)
        first, second = (
            repetitions[:, half].mean(1).double() for half in (order[: r // 2], order[r // 2 : r // 2 * 2])
        )
        half = correlations(first, second)
        found.append((2 * half / (1 + half)).nanmedian())
    return float(torch.stack(found).mean())


def _interval(y: torch.Tensor, parts: list[tuple[np.ndarray, torch.Tensor]], seed: int) -> tuple[float, float]:
    rng, found = np.random.default_rng(seed), []
    for _ in range(_RESAMPLES):
        scores = []
        for test, predicted in parts:
            rows = torch.from_numpy(rng.integers(len(test), size=len(test)))
            scores.append(correlations(y[test][rows], predicted[rows]).nanmedian())
        found.append(float(torch.stack(scores).nanmean()))
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return float(low), float(high)
