"""The image processor ``tiles``: a picture cut into tiles, and the whole of it as one tile."""

from __future__ import annotations

import numpy as np
from PIL import Image

from forge_plugins_vlm.contracts.image_processor import NEWLINE, Layout, Processed
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.images.config import TilesConfig
from forge_plugins_vlm.images.picture import as_rgb, cut_into_tiles, resizing


class Tiles:
    """Follows ``ImageProcessor``."""

    def __init__(self, config: TilesConfig, /, **_: object) -> None:
        self._config = config

    def layout(self, size: Grid, grid: Grid) -> Layout:
        rows, columns = self._config.grid(size)
        tokens = grid[0] * grid[1]
        if rows * columns == 1:
            return Layout(1, np.arange(tokens))
        slots = np.arange(rows * columns * tokens).reshape(rows, columns * tokens)
        ended = np.pad(slots, ((0, 0), (0, 1)), constant_values=NEWLINE).reshape(-1)
        n_tiles = rows * columns
        return Layout(n_tiles + 1, np.concatenate([ended, n_tiles * tokens + np.arange(tokens)]))

    def __call__(self, image: Image.Image, grid: Grid) -> Processed:
        config, rgb = self._config, as_rgb(image)
        size = rgb.height, rgb.width
        rows, columns = self._config.grid(size)
        pixels = resizing(rgb, config)
        tiles = pixels(config.tile_size)[None]
        if rows * columns > 1:
            whole = pixels((rows * config.size, columns * config.size))
            tiles = np.concatenate([cut_into_tiles(whole, config.size), tiles])
        return Processed(tiles, self.layout(size, grid).slots)
