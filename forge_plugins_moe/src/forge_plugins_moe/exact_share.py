"""A setting that is multiplied by counts of tokens, where rounding must not depend on how a float is stored. Nothing
here imports torch."""

from __future__ import annotations

from fractions import Fraction


def exact_share(value: float) -> Fraction:
    """The decimal that was written, or the nearest fraction with a denominator up to a million, so that products with
    counts of tokens fit 64 bits."""
    return Fraction(str(value)).limit_denominator(1_000_000)
