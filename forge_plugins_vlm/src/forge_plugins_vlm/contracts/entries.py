"""The entries that batches with images have beside tokens.

Shapes: B = batch, S = sequence, N = tiles of a row, M = tokens of a tile, F = N · M.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge_core.contracts.batch import Entry

ENTRIES: Mapping[str, Entry] = {
    "pixels": Entry(dims=("sample", "tile", "channel", "height", "width"), dtype="uint8", absent=0),
    "tile_sizes": Entry(dims=("sample", "tile", "side"), absent=0),
    "image_slots": Entry(dims=("sample", "position"), absent=-1),
    "image_range": Entry(dims=("sample", "position", "bound"), absent=0),
}
"""
================  ===================  ================================================================================
``pixels``        ``(B, N, 3, H, W)``  the tiles of the images of each row, in order, then zeros up to the most of any
                                       row of the batch, and at least one
``tile_sizes``    ``(B, N, 2)``        only where tiles are padded: height and width of the part that is the picture
``image_slots``   ``(B, S)``           which of the row's F image tokens stands at a position, ``tile · M + i``; −1: it
                                       is text; −2: the learned end of a row of tiles
``pixels_sizes``  ``(B, 2)``           only in mixtures whose sources give tiles of several sizes: height and width of
                                       the tiles of each row, which are filled up; 0: it has none
``image_range``   ``(B, S, 3)``        tiles that a position sees, which begin at or before it: the first of its
                                       document, the first of the latest images (those with no text between them), and
                                       the end; all three equal: it sees none
================  ===================  ================================================================================

Where an image takes one position (``data.one_token_an_image``), which is enough for a fusion that does not place its
tokens, all ``image_slots`` are −1, and ``image_range`` begins at that position.

A sample without images has the values of ``absent``, so that sources of text alone can be mixed with those of images.
"""
