"""How alike features and recordings are, without a fit: RSA and debiased CKA, with intervals, ceilings and nulls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.cka import linear_cka
from forge_plugins_interp.metrics.config import LEAST_DEBIASED
from forge_plugins_interp.metrics.rsa import bootstrap, noise_ceiling, permutations, rdm, rsa
from forge_plugins_interp.neuro.encoding import halves, interval, of_whole, p_value
from forge_plugins_interp.neuro.recordings import Recordings

Method = Literal["rsa", "cka"]
_RESAMPLES = 200


@attrs.frozen(kw_only=True)
class Resemblance:
    """A score, with what it is to be measured by."""

    score: float
    low: float
    high: float
    """The 95 % interval: of RSA of a bootstrap over stimuli, of CKA over random halves of the stimuli."""
    ceiling: float | None = None
    """The score of one half of the repetitions with the other, corrected by Spearman–Brown. RSA of several subjects:
    the most that any model reaches (Nili et al. 2014). ``None`` without repetitions and subjects."""
    ceiling_low: float | None = None
    ceiling_high: float | None = None
    """The same of the interval of the first two halves; of subjects, the lower and the upper bound."""
    null: tuple[float, ...] = ()
    """Scores for shuffled stimuli."""

    @property
    def normalised(self) -> float | None:
        """``score / ceiling``; ``None`` where the ceiling is not positive."""
        return self.score / self.ceiling if self.ceiling is not None and self.ceiling > 0 else None

    @property
    def p_value(self) -> float | None:
        """The share of shuffled scores that are as high, the score itself counted."""
        return p_value(self.score, self.null)


class Comparison:
    """Recordings that features are compared with. What depends on recordings alone is done once.

    RSA compares with the dissimilarities of each subject: a score is the mean over subjects, and its interval that of a
    bootstrap over stimuli and subjects.

    Args:
        shuffles: how many times stimuli are shuffled for the null distribution.
    """

    def __init__(self, recordings: Recordings, method: Method, *, shuffles: int = 0, seed: int = 0) -> None:
        self._method, self._shuffles, self._seed = method, shuffles, seed
        self._sides = _subjects(recordings) if method == "rsa" else [recordings.mean]
        self._ceiling: dict[str, float] = {}
        if len(self._sides) > 1:
            lower, upper = noise_ceiling(torch.stack([rdm(side) for side in self._sides]))
            self._ceiling = {"ceiling": upper, "ceiling_low": lower, "ceiling_high": upper}
        elif recordings.repetitions.shape[1] > 1:
            number, pairs = recordings.repetitions.shape[1], list(halves(recordings.repetitions, seed=seed))
            low, high = _interval(pairs[0][0], [pairs[0][1]], method, seed)
            whole = float(np.mean([of_whole(_score(first, [second], method), number) for first, second in pairs]))
            ends = {"ceiling_low": of_whole(low, number), "ceiling_high": of_whole(high, number)}
            self._ceiling = {"ceiling": whole, **ends}

    def of(self, x: torch.Tensor) -> Resemblance:
        """
        Args:
            x: features ``(n, p)`` of the stimuli of the recordings, in their order.

        Raises:
            ConfigError: too few stimuli, or a value that is not finite.
        """
        sides, method, seed = self._sides, self._method, self._seed
        score, (low, high) = _score(x, sides, method), _interval(x, sides, method, seed)
        null = tuple(_null(x, sides, method, self._shuffles, seed).tolist()) if self._shuffles else ()
        return Resemblance(score=score, low=low, high=high, null=null, **self._ceiling)


def _subjects(recordings: Recordings) -> list[torch.Tensor]:
    """The mean responses ``(n, q of the subject)`` of each subject; of all neuroids, where no subject is named."""
    if recordings.subjects is None:
        return [recordings.mean]
    names = np.unique(recordings.subjects)
    return [recordings.mean[:, torch.from_numpy(recordings.subjects == name)] for name in names]


def _score(x: torch.Tensor, sides: Sequence[torch.Tensor], method: Method) -> float:
    similarity = rsa if method == "rsa" else linear_cka
    return float(np.mean([similarity(x, side) for side in sides]))


def _interval(x: torch.Tensor, sides: Sequence[torch.Tensor], method: Method, seed: int) -> tuple[float, float]:
    if method == "rsa":
        recorded = torch.stack([rdm(side) for side in sides])
        return interval(bootstrap(rdm(x), recorded, samples=_RESAMPLES, seed=seed).numpy())
    n = len(x)
    if n // 2 < LEAST_DEBIASED:
        raise ConfigError(f"an interval of debiased CKA needs at least {2 * LEAST_DEBIASED} stimuli, and there are {n}")
    # a stimulus that a bootstrap draws twice is similar to itself, which debiased CKA leaves out; random halves without
    # repeats have the same spread (Politis, Romano and Wolf 1999)
    rng = np.random.default_rng(seed)
    parts = [torch.from_numpy(rng.permutation(n)[: n // 2]) for _ in range(_RESAMPLES)]
    return interval(np.array([_score(x[part], [side[part] for side in sides], method) for part in parts]))


def _null(x: torch.Tensor, sides: Sequence[torch.Tensor], method: Method, shuffles: int, seed: int) -> np.ndarray:
    if method == "rsa":
        recorded = torch.stack([rdm(side) for side in sides])
        null: np.ndarray = permutations(rdm(x), recorded, samples=shuffles, seed=seed).numpy()
        return null
    rng = np.random.default_rng(seed + 1)
    return np.array([_score(x[torch.from_numpy(rng.permutation(len(x)))], sides, method) for _ in range(shuffles)])
