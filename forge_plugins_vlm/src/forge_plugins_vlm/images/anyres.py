"""The image processor ``anyres``: a picture as one tile, and again on the best of several grids of tiles.

Liu et al. 2024, "LLaVA-NeXT"; the sums are those of ``transformers``, so that weights trained with it fit.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from forge_plugins_vlm.contracts.image_processor import NEWLINE, Layout, Processed
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.images.best_grid import fitted
from forge_plugins_vlm.images.config import AnyresConfig
from forge_plugins_vlm.images.picture import as_rgb, cut_into_tiles, resizing


class Anyres:
    """Follows ``ImageProcessor``."""

    def __init__(self, config: AnyresConfig, /, **_: object) -> None:
        self._config = config

    def layout(self, size: Grid, grid: Grid) -> Layout:
        rows, columns = self._config.grid(size)
        high, wide = grid
        base = np.arange(high * wide)
        tiles = (1 + np.arange(rows * columns)).reshape(rows, 1, columns, 1) * (high * wide)
        slots = (tiles + base.reshape(1, high, 1, wide)).reshape(rows * high, columns * wide)
        kept = unpadded(slots, size)
        ended = np.pad(kept, ((0, 0), (0, 1)), constant_values=NEWLINE)
        return Layout(1 + rows * columns, np.concatenate([base, ended.reshape(-1)]))

    def __call__(self, image: Image.Image, grid: Grid) -> Processed:
        config, rgb = self._config, as_rgb(image)
        size = rgb.height, rgb.width
        rows, columns = self._config.grid(size)
        target = rows * config.size, columns * config.size
        pixels = resizing(rgb, config)
        inner = pixels(fitted(size, target))
        canvas = np.zeros((3, *target), dtype=np.uint8)
        top, left = (target[0] - inner.shape[1]) // 2, (target[1] - inner.shape[2]) // 2
        canvas[:, top : top + inner.shape[1], left : left + inner.shape[2]] = inner
        tiles = np.concatenate([pixels(config.tile_size)[None], cut_into_tiles(canvas, config.size)])
        return Processed(tiles, self.layout(size, grid).slots)


def unpadded(slots: np.ndarray, size: Grid) -> np.ndarray:
    """The part of a grid of tokens ``(R, C)`` that is the picture of this height and width, put in its middle."""
    (height, width), (rows, columns) = size, slots.shape
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        padding = (rows - kept) // 2
        return slots[padding : rows - padding]
    kept = int(round(width * (rows / height), 7))
    padding = (columns - kept) // 2
    return slots[:, padding : columns - padding]
