"""FLOPs of matrices, one behind another."""

from __future__ import annotations

from itertools import pairwise


def matrix_flops(*widths: int) -> float:
    """Of the forward of one position, from each width to the next: 2 a weight."""
    return 2.0 * sum(before * after for before, after in pairwise(widths))
