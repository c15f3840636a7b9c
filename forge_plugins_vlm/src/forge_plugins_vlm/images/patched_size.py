"""How large a picture is that has so many patches at most.

The sums are those of ``transformers``. Nothing here may import PIL.
"""

from __future__ import annotations

import math

from forge_plugins_vlm.contracts.vision_encoder import Grid

_EXACT = 1e-5
"""Of a scale."""
_LARGEST = 100.0
"""The largest scale."""


def patched_size(size: Grid, patch: int, max_patches: int, most: int) -> Grid:
    """Height and width that keep the shape of a picture, are multiples of ``patch``, and make ``max_patches`` at most.

    The scale ``s`` is found by halving, so that ``⌈h · s / p⌉ · ⌈w · s / p⌉ ≤ max_patches``.

    Args:
        most: the longest that a side may be in pixels.
    """

    def at(scale: float) -> Grid:
        height, width = (max(patch, math.ceil(one * scale / patch) * patch) for one in size)
        return height, width

    low, high = _EXACT / 10, _LARGEST
    while high - low >= _EXACT:
        middle = (low + high) / 2
        height, width = at(middle)
        if (height // patch) * (width // patch) <= max_patches and max(height, width) <= most:
            low = middle
        else:
            high = middle
    return at(low)
