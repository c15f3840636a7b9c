"""Which documents are in which sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_plugins_data.best_fit import best_fit
from forge_plugins_vlm.data.document import Document


def pack(documents: Sequence[Document], seq_len: int, max_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Put documents together, the longest first, each where the least room is left and the images are not too many.

    Returns:
        ``order`` ``(D,)``, the documents sample by sample, and ``bounds`` ``(N + 1,)``, as ``best_fit`` has them.
    """
    lengths = np.array([document.positions(seq_len) for document in documents], dtype=np.int64)
    images = np.array([len(document.images) for document in documents], dtype=np.int64)
    return best_fit(lengths, seq_len, images, max_images)


def one_each(documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Each document as a sample of its own, in their order; returns what ``pack`` does."""
    return np.arange(len(documents)), np.arange(len(documents) + 1)
