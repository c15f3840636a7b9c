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
    rows, length = tokens.shape
    ends = np.flatnonzero(tokens == end_of_document)
    targets[ends // length, ends % length] = IGNORED

    # Documents are long, so all is done on the flat indices where they start, and spread over their tokens once.
    row_starts = np.arange(0, tokens.size, length)
    after_ends = ends + 1
    starts = np.sort(np.concatenate([row_starts, after_ends[after_ends % length != 0]]))
    lengths = np.diff(starts, append=tokens.size)
    number_in_row = np.arange(starts.size) - np.searchsorted(starts, starts // length * length)
    return {
        "document": np.repeat(number_in_row, lengths).reshape(rows, length),
        "positions": (np.arange(tokens.size) - np.repeat(starts, lengths)).reshape(rows, length),
    }
