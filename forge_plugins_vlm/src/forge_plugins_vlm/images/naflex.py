"""The image processor ``naflex``: a picture in its own shape, of so many patches at most.

Tschannen et al. 2025, "SigLIP 2", section 2.4.2; the sums are those of ``transformers``.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from forge_plugins_vlm.contracts.image_processor import Layout, Processed
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.images.config import NaflexConfig
from forge_plugins_vlm.images.picture import as_rgb, pixels_of, resized


class Naflex:
    """Follows ``ImageProcessor``."""

    def __init__(self, config: NaflexConfig, /, **_: object) -> None:
        self._config = config

    def layout(self, size: Grid, grid: Grid) -> Layout:
        inner, side = self._config.picture_size(size), self._config.size
        rows, columns = (math.ceil(tokens * pixels / side) for tokens, pixels in zip(grid, inner, strict=True))
        slots = np.arange(grid[0] * grid[1]).reshape(grid)
        return Layout(1, slots[:rows, :columns].reshape(-1))

    def __call__(self, image: Image.Image, grid: Grid) -> Processed:
        config, rgb = self._config, as_rgb(image)
        size = rgb.height, rgb.width
        height, width = self._config.picture_size(size)
        tile = np.zeros((1, 3, config.size, config.size), dtype=np.uint8)
        tile[0, :, :height, :width] = pixels_of(resized(rgb, (height, width), config.resample))
        return Processed(tile, self.layout(size, grid).slots, np.array([[height, width]]))
