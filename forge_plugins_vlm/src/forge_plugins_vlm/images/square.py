"""The image processor ``square``: one tile a picture."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from forge_plugins_vlm.contracts.image_processor import Layout, Processed
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.images.config import SquareConfig
from forge_plugins_vlm.images.picture import FILTERS, as_rgb, pixels_of, resized

_GREY = (127, 127, 127)


class Square:
    """Follows ``ImageProcessor``."""

    def __init__(self, config: SquareConfig, /, **_: object) -> None:
        self._config = config

    def layout(self, size: Grid, grid: Grid) -> Layout:
        return Layout(1, np.arange(grid[0] * grid[1]))

    def __call__(self, image: Image.Image, grid: Grid) -> Processed:
        config, rgb = self._config, as_rgb(image)
        size, method = (config.size, config.size), FILTERS[config.resample]
        if config.fit == "crop":
            rgb = ImageOps.fit(rgb, size, method)
        elif config.fit == "pad":
            rgb = ImageOps.pad(rgb, size, method, color=_GREY)
        else:
            rgb = resized(rgb, size, config.resample)
        return Processed(pixels_of(rgb)[None], self.layout((image.height, image.width), grid).slots)
