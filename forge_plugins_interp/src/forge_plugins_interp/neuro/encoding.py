"""Encoding: how well recordings are predicted from features, on stimuli that were held out (Schrimpf et al. 2018).

Shapes: n = stimuli, p = features, q = neuroids, r = repetitions.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.matrices import checked
from forge_plugins_interp.neuro.regression import LinearMap, Regression

LEAST = 10
"""Stimuli."""
_LEAST_HELD = 5
"""Stimuli that are held out: of two, any correlation is 1 or −1."""
_RESAMPLES = 500
_AT_ONCE = 50
"""Bootstrap samples in memory, as neuroids may be all voxels of a brain."""
_TARGETS = 10_000
"""Fitted at once, as there are weights of each in memory."""
_SECONDS = 10.0
"""Between two lines that say how far it is."""
Value = TypeVar("Value", float, torch.Tensor)
Part = tuple[torch.Tensor, torch.Tensor, np.ndarray]
"""Of a split: recordings that are held out, what is predicted of them, and the numbers of these stimuli."""


@attrs.frozen(kw_only=True)
class Splits:
    """Training and test stimuli."""

    number: int = 10
    test: float = 0.1
    """The share of stimuli, or of groups; more where these are fewer than 5 stimuli."""
    seed: int = 0

    def of(self, n: int, groups: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Numbers of training and of test stimuli. No group is in both.

        Raises:
            ConfigError: there are too few stimuli, or fewer than two groups.
        """
        if n < LEAST:
            raise ConfigError(f"an encoding score needs at least {LEAST} stimuli, and there are {n}")
        names = np.arange(n) if groups is None else groups
        unique, sizes = np.unique(names, return_counts=True)
        if len(unique) < 2:
            raise ConfigError(f"all stimuli are of the group {str(unique[0])!r}, so that none can be held out")
        rng = np.random.default_rng(self.seed)
        for _ in range(self.number):
            order = rng.permutation(len(unique))
            enough = 1 + int(np.searchsorted(sizes[order].cumsum(), _LEAST_HELD))
            n_test = min(max(enough, round(self.test * len(unique))), len(unique) - 1)
            is_test = np.isin(names, unique[order[:n_test]])
            yield np.flatnonzero(~is_test), np.flatnonzero(is_test)


@attrs.frozen(kw_only=True, eq=False)
class EncodingScore:
    """A score, with what it is to be measured by."""

    score: float
    """Pearson's r of each neuroid on held-out stimuli: the median over neuroids, and the mean over splits."""
    low: float
    high: float
    """The 95 % interval of a bootstrap over stimuli; maps are not fitted again."""
    of_neuroids: torch.Tensor
    """``(q,)``, the mean over splits."""
    ceiling: float | None = None
    """The median reliability of neuroids (``reliabilities``); ``None`` without repetitions."""
    ceiling_low: float | None = None
    ceiling_high: float | None = None
    """The 95 % interval of a bootstrap over stimuli."""
    normalised: float | None = None
    """The score with each neuroid divided by its own reliability, without neuroids whose reliability is not
    positive. It may be above 1: all but the noise correlates as the square root of the reliability."""
    null: tuple[float, ...] = ()
    """Scores for shuffled stimuli."""
    of_bands: torch.Tensor | None = None
    """``(bands, q)``: each band's part of r (``split_correlations``), the mean over splits; ``None`` without bands. The
    sum over bands is ``of_neuroids``."""

    @property
    def p_value(self) -> float | None:
        """The share of shuffled scores that are as high, the score itself counted."""
        return p_value(self.score, self.null)


def encode(
    x: torch.Tensor,
    repetitions: torch.Tensor,
    regression: Regression,
    *,
    splits: Splits | None = None,
    groups: np.ndarray | None = None,
    shuffles: int = 0,
    widths: Sequence[int] = (),
    log: Callable[[str], None] = lambda _: None,
) -> EncodingScore:
    """The encoding score of features for recordings.

    Args:
        x: ``(n, p)``.
        repetitions: ``(n, r, q)``; their mean is predicted.
        groups: ``(n,)``, which are not split.
        shuffles: how many times stimuli are shuffled for the null distribution, each by itself: p is too small where
            neighbours in a group are alike, as moments of a recording are.
        widths: features of each band, where their parts of the score are wanted.
        log: is told how far it is, if it takes long.

    Raises:
        ConfigError: too few stimuli, other numbers of them, a value that is not finite, or no neuroid that varies in
            what is held out.
    """
    splits = splits or Splits()
    x, y = checked(x, repetitions.mean(1), LEAST)
    rng = np.random.default_rng(splits.seed + 1)
    orders = [torch.arange(len(y)), *(torch.from_numpy(rng.permutation(len(y))) for _ in range(shuffles))]
    parts: list[list[Part]] = [[] for _ in orders]
    progress = _Progress(splits.number * len(orders), log)
    of_bands: list[torch.Tensor] = []
    for train, test in splits.of(len(x), groups):
        fit = regression.of(x[train], None if groups is None else groups[train])
        maps = _fitted(fit, [y[order[train]] for order in orders], together=regression.per_target, told=progress)
        for part, order, found in zip(parts, orders, maps, strict=True):
            part.append((y[order[test]], found(x[test]), test))
            if widths and order is orders[0]:
                of_bands.append(split_correlations(y[test], found.parts(x[test], widths)))
    once, draws = torch.ones(1, len(y), dtype=torch.float64), resamples(len(y), splits.seed)
    each = torch.stack([correlations(held_out, predicted) for held_out, predicted, _ in parts[0]])
    if bool(each.isnan().all()):
        raise ConfigError(f"none of the {y.shape[1]} neuroids varies in stimuli that are held out")
    low, high = interval(_scores(parts[0], draws))
    score, *null = (float(_scores(part, once)[0]) for part in parts)
    known: dict[str, Any] = {"score": score, "low": low, "high": high, "of_neuroids": each.nanmean(0)}
    known |= {"null": tuple(null), "of_bands": torch.stack(of_bands).nanmean(0) if of_bands else None}
    if repetitions.shape[1] == 1:
        return EncodingScore(**known)
    reliable = reliabilities(repetitions, seed=splits.seed)
    ends = interval(
        np.concatenate(
            [_medians(reliabilities(repetitions, some, seed=splits.seed)) for some in torch.split(draws, _AT_ONCE)]
        )
    )
    return EncodingScore(
        **known,
        ceiling=float(np.nanmedian(reliable.numpy())),
        ceiling_low=ends[0],
        ceiling_high=ends[1],
        normalised=float(_scores(parts[0], once, reliable.where(reliable > 0, torch.nan))[0]),
    )


def _fitted(
    fit: Callable[[torch.Tensor], LinearMap], targets: Sequence[torch.Tensor], *, together: bool, told: _Progress
) -> Iterator[LinearMap]:
    """The map of each of several ``(n, q)``.

    Args:
        together: fit as many at a time as there is room for.
        told: of all maps that are fitted at a time, in one go.
    """
    size = targets[0].shape[1]
    at_once = max(1, _TARGETS // size) if together else 1
    for start in range(0, len(targets), at_once):
        maps = fit(torch.cat(list(targets[start : start + at_once]), 1)).split(size)
        told.more(len(maps))
        yield from maps


class _Progress:
    """Tells ``log`` now and then how many maps there are, of so many."""

    def __init__(self, total: int, log: Callable[[str], None]) -> None:
        self._total, self._log, self._done = total, log, 0
        self._began = self._said = time.monotonic()

    def more(self, number: int) -> None:
        """There are so many more."""
        self._done += number
        if (now := time.monotonic()) - self._said > _SECONDS:
            self._said = now
            left = (now - self._began) * (self._total / self._done - 1)
            self._log(f"{self._done:,} of {self._total:,} maps; about {left / 60:.1f} min left")


def correlations(y: torch.Tensor, predicted: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Pearson's r of each column: NaN where the recording is constant, which has none; 0 where only the prediction is,
    which predicts nothing.

    Args:
        y, predicted: ``(n, q)``.
        weights: of rows, ``(b, n)`` float64, such as how often a bootstrap draws each.

    Returns:
        ``(q,)``, or ``(b, q)`` with weights.
    """
    # about the mean first: sums of squares of large numbers lose digits
    y, predicted = (one.double() - one.double().mean(0) for one in (y, predicted))
    shares = torch.full((1, len(y)), 1 / len(y), dtype=torch.float64)
    shares = shares if weights is None else weights / weights.sum(1, keepdim=True)
    mean_y, mean_p = shares @ y, shares @ predicted
    var_y, var_p = (shares @ one.square() - mean.square() for one, mean in ((y, mean_y), (predicted, mean_p)))
    r = (shares @ (y * predicted) - mean_y * mean_p) / (var_y.clamp(min=0) * var_p.clamp(min=0)).sqrt()
    r = r.where(~_vanishes(var_p, predicted), 0.0).where(~_vanishes(var_y, y), torch.nan).clamp(-1, 1)
    return r[0] if weights is None else r


def split_correlations(y: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Pearson's r of the sum of predictions, shared out: ``cov(y, ŷ_b) / (σ_y σ_ŷ)`` of each band b, whose sum is r.

    It is the product measure of Dupré la Tour et al. 2022, of r in place of R². A band that misleads has a negative
    part.

    Args:
        y: ``(n, q)``.
        parts: ``(bands, n, q)``.

    Returns:
        ``(bands, q)``; NaN where the recording is constant, 0 where only the prediction is.
    """
    y, parts = y - y.mean(0), parts - parts.mean(1, keepdim=True)
    whole = parts.sum(0)
    covariances, var_y, var_p = (parts * y).mean(1), y.square().mean(0), whole.square().mean(0)
    r = covariances / (var_y * var_p).sqrt()
    return r.where(~_vanishes(var_p, whole), 0.0).where(~_vanishes(var_y, y), torch.nan)


def _vanishes(variance: torch.Tensor, centred: torch.Tensor) -> torch.Tensor:
    return variance <= 1e-14 * centred.square().mean(0) + torch.finfo(torch.float64).tiny


def reliabilities(
    repetitions: torch.Tensor, weights: torch.Tensor | None = None, *, halvings: int = 20, seed: int = 0
) -> torch.Tensor:
    """How reliable the mean over repetitions is: Pearson's r over stimuli of the means of two random halves, corrected
    for the length (``of_whole``); the mean over halvings.

    Args:
        repetitions: ``(n, r, q)``, r at least 2.
        weights: of stimuli, as in ``correlations``.

    Returns:
        ``(q,)``, or ``(b, q)`` with weights.
    """
    found = []
    for first, second in halves(repetitions, halvings=halvings, seed=seed):
        half = correlations(first, second, weights)
        found.append(of_whole(half, repetitions.shape[1]))
    return torch.stack(found).mean(0)


def of_whole(half: Value, repetitions: int) -> Value:
    """The correlation of means over all repetitions, from ``half``, that of means over ``repetitions // 2`` each, by
    Spearman–Brown: ``k r / (1 + (k − 1) r)`` for k times as many, ``2r / (1 + r)`` where they are even."""
    times = repetitions / (repetitions // 2)
    return times * half / (1 + (times - 1) * half)


def halves(
    repetitions: torch.Tensor, *, halvings: int = 20, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The means ``(n, q)`` of two random halves of repetitions, ``halvings`` times; of two repetitions, once.

    Raises:
        ConfigError: there is one repetition only.
    """
    r = repetitions.shape[1]
    if r < 2:
        raise ConfigError(f"a ceiling needs at least 2 repetitions of each stimulus, and there is {r}")
    rng = np.random.default_rng(seed)
    for _ in range(halvings if r > 2 else 1):
        order = rng.permutation(r)
        first, second = order[: r // 2], order[r // 2 : r // 2 * 2]
        yield repetitions[:, first].mean(1).double(), repetitions[:, second].mean(1).double()


def resamples(n: int, seed: int = 0) -> torch.Tensor:
    """How often each of n stimuli is drawn in bootstrap samples, ``(b, n)`` float64. A stimulus that several splits
    hold out is drawn equally often in all: splits are not independent, and more of them make no interval smaller."""
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES)
    return torch.from_numpy(counts).double()


def interval(scores: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of ``(b,)``; NaN where all are."""
    low, high = _quiet(partial(np.nanpercentile, q=[2.5, 97.5]), scores, 0)
    return float(low), float(high)


def p_value(score: float, null: Sequence[float]) -> float | None:
    """The share of null scores that are as high, the score itself counted; ``None`` without any, or without a score."""
    return (1 + sum(one >= score for one in null)) / (1 + len(null)) if len(null) and not np.isnan(score) else None


def _scores(parts: Sequence[Part], weights: torch.Tensor, ceilings: torch.Tensor | None = None) -> np.ndarray:
    """The median over neuroids and the mean over splits, ``(b,)``, for weights of stimuli ``(b, n)``."""
    of_splits = []
    for y, predicted, test in parts:
        r = (correlations(y, predicted, some[:, test]) for some in torch.split(weights, _AT_ONCE))
        of_splits.append(np.concatenate([_medians(one if ceilings is None else one / ceilings) for one in r]))
    return _quiet(np.nanmean, np.stack(of_splits), 0)


def _medians(values: torch.Tensor) -> np.ndarray:
    """``(b, q)`` to ``(b,)``; unlike torch's, the mean of two in the middle."""
    return _quiet(np.nanmedian, values.numpy(), 1)


def _quiet(reduce: Callable[..., np.ndarray], values: np.ndarray, axis: int) -> np.ndarray:
    """``reduce`` over what is not NaN, and NaN where all is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return reduce(values, axis=axis)
