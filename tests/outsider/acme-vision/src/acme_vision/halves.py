"""A picture as two tiles: its left or upper half, and the other one."""

import numpy as np
from PIL import Image

from forge_plugins_vlm.contracts.image_processor import Layout, Processed
from forge_plugins_vlm.images.picture import as_rgb, pixels_of


class Halves:
    def __init__(self, config, /, **_):
        self.size = config.size

    def layout(self, size, grid):
        return Layout(2, np.arange(2 * grid[0] * grid[1]))

    def __call__(self, image, grid):
        rgb, (high, wide) = as_rgb(image), self._shape(image)
        both = rgb.resize((wide * self.size, high * self.size), Image.Resampling.BILINEAR)
        first = pixels_of(both.crop((0, 0, self.size, self.size)))
        second = pixels_of(both.crop(((wide - 1) * self.size, (high - 1) * self.size, *both.size)))
        return Processed(np.stack([first, second]), self.layout((image.height, image.width), grid).slots)

    def _shape(self, image):
        """Rows and columns of tiles."""
        return (1, 2) if image.width >= image.height else (2, 1)
