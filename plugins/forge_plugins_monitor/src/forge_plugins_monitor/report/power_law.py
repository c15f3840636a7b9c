"""Power laws of loss: against the compute of runs, or against the steps of one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

_TRIED = 400
"""Irreducible losses that are tried at a time."""
_TIMES = 3
"""So often they are tried, each time between the neighbours of the best: what is printed of a law then follows from
the losses."""


@attrs.frozen
class PowerLaw:
    """``loss = floor + factor · x^−exponent`` (Kaplan et al. 2020, arXiv:2001.08361; with a floor, Henighan et al.
    2020, arXiv:2010.14701)."""

    floor: float
    """The irreducible loss, in nats a token; 0 if it was not fitted."""
    factor: float
    exponent: float
    r_squared: float
    """The share of the variance of ``log(loss − floor)`` that it explains."""

    def __call__(self, x: float) -> float:
        """The loss at ``x``."""
        return self.floor + self.factor * math.exp(-self.exponent * math.log(x))


def fit(
    x: Sequence[float], loss: Sequence[float], *, with_floor: bool, weights: Sequence[float] | None = None
) -> PowerLaw:
    """The power law of least squares in ``log(loss − floor)``.

    Args:
        x: compute, or steps; above 0, not all the same.
        loss: above 0.
        with_floor: whether ``floor`` is fitted, from 0 to just below the lowest loss: that of the least squares in
            ``log(loss)``. Three numbers fit four points too well to say anything.
        weights: of the squares, above 0; by default all the same.

    Raises:
        OverflowError: numbers are too far from each other.
    """
    log_x, y = np.log(np.asarray(x, dtype=np.float64)), np.asarray(loss, dtype=np.float64)
    share = np.ones_like(y) if weights is None else np.asarray(weights, dtype=np.float64)
    share = share / share.sum()
    law, floor, step = _best(log_x, y, share, np.zeros(1)), 0.0, y.min() / _TRIED
    for _ in range(_TIMES if with_floor else 0):
        law = _best(log_x, y, share, floor + step * np.arange(_TRIED))
        floor, step = max(0.0, law.floor - step), 2 * step / _TRIED
    return law


def _best(log_x: np.ndarray, y: np.ndarray, share: np.ndarray, floors: np.ndarray) -> PowerLaw:
    """Of the laws with these ``floors``."""
    logs = np.log(y - floors[:, None])  # (floors, points)

    centre, means = log_x @ share, logs @ share
    away = log_x - centre
    variance, covariances = (away**2) @ share, logs @ (away * share)
    slopes = covariances / variance
    lines = means[:, None] + slopes[:, None] * away
    # log(floor + exp(line)), which does not overflow
    with np.errstate(divide="ignore"):
        fitted = np.logaddexp(np.log(floors)[:, None], lines)
    best = int((((fitted - np.log(y)) ** 2) @ share).argmin())

    spread = float(((logs[best] - means[best]) ** 2) @ share)
    explained = float(covariances[best] ** 2 / (variance * spread)) if spread > 0 else 1.0
    factor = math.exp(means[best] - slopes[best] * centre)
    return PowerLaw(float(floors[best]), factor, -float(slopes[best]), explained)
