"""Documents that share a sample, kept apart."""

from __future__ import annotations

import numpy as np

from forge_core.contracts.loss import IGNORED


def document_inputs(tokens: np.ndarray, targets: np.ndarray, end_of_document: int) -> dict[str, np.ndarray]:
    """Which document each token is of, and where in it; targets across a boundary are ignored.

    A document ends with ``end_of_document``, which belongs to it and has no target. The first document of a sample may
    be the rest of one that began before: its positions start at 0 as well.

    Args:
        tokens: ``(B, S)`` int64.
        targets: ``(B, S)`` int64, written to: −100 where ``tokens`` is ``end_of_document``.

    Returns:
        ``document`` ``(B, S)`` int64, 0 for the first document of each row, and ``positions`` ``(B, S)`` int64.
    """
    ends = tokens == end_of_document
    targets[ends] = IGNORED

    document = np.zeros_like(tokens)
    np.cumsum(ends[:, :-1], axis=1, out=document[:, 1:])

    columns = np.arange(tokens.shape[1])
    starts = np.zeros_like(tokens)
    np.multiply(ends[:, :-1], columns[1:], out=starts[:, 1:])
    np.maximum.accumulate(starts, axis=1, out=starts)
    np.subtract(columns, starts, out=starts)
    return {"document": document, "positions": starts}
