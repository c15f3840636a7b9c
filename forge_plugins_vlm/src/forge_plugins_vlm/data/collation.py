"""The one collation: documents and their images become a batch.

Shapes: B = batch, S = sequence, N = tiles of a row, M = tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from forge_core.contracts.loss import IGNORED
from forge_plugins_vlm.contracts.image_processor import ImageProcessorConfig, Processed
from forge_plugins_vlm.data.document import TEXT, Document


@attrs.frozen(kw_only=True)
class Shape:
    """What batches have in common."""

    seq_len: int
    """S."""
    fill: int
    """The id behind the last document of a row."""
    processor: ImageProcessorConfig
    tokens_a_tile: int
    """M."""
    packed: bool
    """Whether rows may have several documents, so that batches say which is where."""


Row = Sequence[tuple[Document, Sequence[Processed]]]
"""Documents, each with its images."""


def collate(rows: Sequence[Row], shape: Shape) -> dict[str, np.ndarray]:
    """Stack rows.

    The target of a position is the token behind it in its document, if that is learned, and −100 otherwise: for
    prompts, images and padding. Of a document of S + 1 tokens, the last one is a target alone.

    Returns:
        ``tokens``, ``targets`` and ``positions`` ``(B, S)``, −1 at padding, the entries of
        ``forge_plugins_vlm.contracts.entries``, and for packed rows ``document`` ``(B, S)``, in which the padding is a
        document of its own.
    """
    size = len(rows), shape.seq_len
    n_tiles = max(1, *(sum(document.n_tiles for document, _ in row) for row in rows)) if rows else 1
    batch: dict[str, np.ndarray] = {
        "tokens": np.full(size, shape.fill, dtype=np.int64),
        "targets": np.full(size, IGNORED, dtype=np.int64),
        "positions": np.full(size, -1, dtype=np.int64),
        "pixels": np.zeros((len(rows), n_tiles, 3, *shape.processor.tile_size), dtype=np.uint8),
        "image_slots": np.full(size, TEXT, dtype=np.int64),
        "image_range": np.zeros((*size, 3), dtype=np.int64),
    }
    if shape.processor.pads:
        batch["tile_sizes"] = np.zeros((len(rows), n_tiles, 2), dtype=np.int64)
    if shape.packed:
        batch["document"] = np.zeros(size, dtype=np.int64)
    for number, row in enumerate(rows):
        _fill({name: values[number] for name, values in batch.items()}, row, shape)
    return batch


def _fill(into: dict[str, np.ndarray], row: Row, shape: Shape) -> None:
    """Write a row, document by document."""
    at = tiles = number = 0
    for number, (document, images) in enumerate(row):
        length = document.positions(shape.seq_len)
        here = slice(at, at + length)
        into["tokens"][here] = document.tokens[:length]
        following = np.where(document.learned[1:], document.tokens[1:], IGNORED)
        into["targets"][at : at + len(following)] = following
        slots = document.slots[:length]
        into["image_slots"][here] = np.where(slots >= 0, slots + tiles * shape.tokens_a_tile, slots)
        into["image_range"][here] = document.ranges()[:length] + tiles
        into["positions"][here] = np.arange(length)
        if shape.packed:
            into["document"][here] = number
        for image in images:
            these = slice(tiles, tiles + len(image.tiles))
            into["pixels"][these] = image.tiles
            if image.sizes is not None:
                into["tile_sizes"][these] = image.sizes
            tiles += len(image.tiles)
        at += length
    if shape.packed:
        into["document"][at:] = number + 1
