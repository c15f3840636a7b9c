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
            rgb = _padded(rgb, config)
        else:
            rgb = resized(rgb, size, config.resample)
        return Processed(pixels_of(rgb)[None], self.layout((image.height, image.width), grid).slots)


def _padded(rgb: Image.Image, config: SquareConfig) -> Image.Image:
    """As ``ImageOps.pad``, except that no picture is so long that nothing of it is left."""
    longest, side = max(rgb.size), config.size
    width, height = (max(1, round(one / longest * side)) for one in rgb.size)
    padded = Image.new("RGB", (side, side), _GREY)
    inner = resized(rgb, (height, width), config.resample)
    padded.paste(inner, (round((side - width) * 0.5), round((side - height) * 0.5)))
    return padded
