"""The grid of tiles that suits a picture.

The sums are those of ``transformers``. Nothing here may import PIL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from forge_plugins_vlm.contracts.vision_encoder import Grid


def best_resolution(size: Grid, resolutions: Iterable[Grid]) -> Grid:
    """The resolution that keeps most pixels of a picture, and of those the one that has fewest others.

    Args:
        size: height and width of the picture.
        resolutions: heights and widths, at least one.
    """
    height, width = size

    def kept_and_spared(resolution: Grid) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=kept_and_spared)


def fitted(size: Grid, target: Grid) -> Grid:
    """Height and width of a picture that just fits into ``target`` in its own shape."""
    (height, width), (most_height, most_width) = size, target
    by_height, by_width = most_height / height, most_width / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), most_height), most_width
    return most_height, min(math.ceil(width * by_height), most_width)
