"""Image processors: from a picture to tiles, and to the order of their tokens in the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from forge_plugins_vlm.contracts.vision_encoder import Grid

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

NEWLINE = -2
"""In ``Processed.slots``: the learned token that ends a row."""
AtLeast = Callable[[Grid], Grid | None]
"""Same as ``ImageProcessorConfig.at_least``."""


@attrs.frozen(eq=False)
class Layout:
    """A picture's tiles and tokens, which depend on its height and width alone."""

    n_tiles: int
    """``n``, at least 1."""
    slots: np.ndarray
    """``(L,)`` int64: the tokens that it takes in the text, in order. ``tile · M + i`` is token i of a tile, of M that
    each has; ``NEWLINE`` is the learned end of a row."""


@attrs.frozen(eq=False)
class Processed:
    """A picture as a model reads it."""

    tiles: np.ndarray
    """``(n, 3, H, W)`` uint8, RGB."""
    slots: np.ndarray
    """``(L,)`` int64, those of its layout."""
    sizes: np.ndarray | None = None
    """``(n, 2)`` int64: height and width of the part of each tile that is the picture; ``None``: all of it."""


@attrs.frozen(kw_only=True)
class ImageProcessorConfig(ABC):
    """What is known of a processor before it is built. Config classes of processors extend this one."""

    @property
    @abstractmethod
    def tile_size(self) -> Grid:
        """Height and width of its tiles, in pixels."""

    @property
    def pads(self) -> bool:
        """Whether its tiles have padding, so that the encoder has to be told (``sizes``)."""
        return False

    @property
    def has_newlines(self) -> bool:
        """Whether rows of a picture end in ``NEWLINE``."""
        return False

    @property
    def depends_on_size(self) -> bool:
        """Whether pictures of different sizes have different layouts, so that data read the sizes of all of them when
        they are opened."""
        return True

    @property
    @abstractmethod
    def most_tiles(self) -> int:
        """The most tiles that a picture becomes."""

    def at_least(self, size: Grid) -> Grid | None:
        """Height and width that suffice of a picture of this size; ``None``: all of it is needed.

        A JPEG is decoded at a half, a quarter or an eighth of its size, if that leaves so much, and if this says the
        same of what is left. Pictures that it says the same of have one layout.
        """
        return None if self.depends_on_size else self.tile_size


class ImageProcessor(Protocol):
    """Turns pictures into tiles. It is free of side effects and safe from threads."""

    def layout(self, size: Grid, grid: Grid) -> Layout:
        """The tiles and tokens of a picture, without its pixels: what ``__call__`` gives for it.

        Args:
            size: height and width of the picture.
            grid: rows and columns of the tokens that the connector gives for a tile.
        """
        ...

    def __call__(self, image: Image, grid: Grid) -> Processed:
        """Process a picture.

        Args:
            image: of any size and mode, upright.
            grid: rows and columns of the tokens that the connector gives for a tile.
        """
        ...


class ImageProcessorFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /) -> ImageProcessor:
        """Build the processor.

        Args:
            config: extends ``ImageProcessorConfig``.
        """
        ...
