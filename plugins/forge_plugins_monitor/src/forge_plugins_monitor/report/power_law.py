"""Power laws of loss against compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

LEAST_FOR_FLOOR = 5
"""Sizes below which no irreducible loss is fitted: three numbers fit four points too well to say anything."""
_TRIED = 400
"""Irreducible losses that are tried."""


@attrs.frozen
class PowerLaw:
    """``loss = floor + factor · compute^−exponent`` (Kaplan et al. 2020, arXiv:2001.08361; with a floor, Henighan et
    al. 2020, arXiv:2010.14701)."""

    floor: float
    """The irreducible loss, in nats a token; 0 if it was not fitted."""
    factor: float
    exponent: float
    r_squared: float
    """The share of the variance of ``log(loss − floor)`` that it explains."""

    def __call__(self, compute: float) -> float:
        """The loss at ``compute``."""
        return self.floor + self.factor * math.exp(-self.exponent * math.log(compute))


def fit(compute: Sequence[float], loss: Sequence[float], n_sizes: int) -> PowerLaw:
    """The power law of least squares in ``log(loss − floor)``.

    Args:
        compute: above 0, the highest clearly above the lowest.
        loss: above 0.
        n_sizes: different models among them. With ``LEAST_FOR_FLOOR`` or more, ``floor`` is fitted, from 0 to just
            below the lowest loss: that of the least squares in ``log(loss)``.
    """
    lowest = min(loss)
    floors = [lowest * i / _TRIED for i in range(_TRIED)] if n_sizes >= LEAST_FOR_FLOOR else [0.0]
    laws = [_line(compute, loss, floor) for floor in floors]

    def misses(law: PowerLaw) -> float:
        return sum(math.log(law(c) / y) ** 2 for c, y in zip(compute, loss, strict=True))

    return min(laws, key=misses)


def _line(compute: Sequence[float], loss: Sequence[float], floor: float) -> PowerLaw:
    """A straight line through the logarithms."""
    xs, ys = [math.log(c) for c in compute], [math.log(y - floor) for y in loss]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    variance, spread = sum((x - x_mean) ** 2 for x in xs), sum((y - y_mean) ** 2 for y in ys)
    slope = covariance / variance
    explained = covariance**2 / (variance * spread) if spread > 0 else 1.0
    return PowerLaw(floor, math.exp(y_mean - slope * x_mean), -slope, explained)
