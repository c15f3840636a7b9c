"""The entries by which the engine counts, for sources that have none of them (``TokenlessSource``)."""

from __future__ import annotations

import numpy as np

from forge_core.contracts.data_source import Source, StreamedSource, TokenlessSource
from forge_core.contracts.loss import IGNORED


def counted_entry(source: Source | StreamedSource) -> str | None:
    """The entry that a ``TokenlessSource`` is counted in; ``None`` of another source."""
    return source.counted_in if isinstance(source, TokenlessSource) else None


def with_counts(batch: dict[str, np.ndarray], entry: str | None) -> dict[str, np.ndarray]:
    """The batch with ``tokens`` and ``targets`` ``(B, S)``, zeros, and targets of −100 where ``positions`` is −1.

    Args:
        entry: as ``counted_entry`` gives it; with ``None``, the batch stays as it is.
    """
    if entry is None:
        return batch
    tokens = np.zeros(batch[entry].shape[:2], np.int64)
    positions = batch.get("positions")
    targets = tokens.copy() if positions is None else np.where(positions < 0, IGNORED, tokens)
    return {"tokens": tokens, "targets": targets, **batch}
