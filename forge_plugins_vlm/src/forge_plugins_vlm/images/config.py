"""The keys of image processors. Nothing here may import PIL."""

from __future__ import annotations

import math
from typing import Any, Literal

import attrs
from attrs.validators import and_, ge, le

from forge_plugins_vlm.contracts.image_processor import ImageProcessorConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.images.best_grid import best_resolution, fitted
from forge_plugins_vlm.images.patched_size import patched_size

Fit = Literal["stretch", "crop", "pad"]
Resample = Literal["bicubic", "bilinear", "lanczos"]
Resampler = Literal["pillow", "torch"]

_MOST_TILES = 1024
"""Of a picture; batches have room for as many."""


@attrs.frozen(kw_only=True)
class OfSquareTiles(ImageProcessorConfig):
    """What processors have in common whose tiles are squares.

    Pictures of any mode become RGB: what is transparent is put on white, and 16 bits become 8.
    """

    size: int = attrs.field(default=224, validator=ge(1))
    """Height and width of a tile in pixels: the size that the encoder takes."""
    resample: Resample = "bicubic"
    """The filter by which pictures are resized. Weights of an encoder want that of its processor's configuration."""

    @property
    def tile_size(self) -> Grid:
        """Same as ``ImageProcessorConfig.tile_size``."""
        return self.size, self.size


@attrs.frozen(kw_only=True)
class SquareConfig(OfSquareTiles):
    """One tile a picture."""

    fit: Fit = "stretch"
    """How a picture that is no square becomes one: ``stretch`` it, ``crop`` its middle, or ``pad`` it on both sides
    with grey of 127, near the mean of photographs."""

    @property
    def depends_on_size(self) -> bool:
        """Same as ``ImageProcessorConfig.depends_on_size``."""
        return False

    @property
    def most_tiles(self) -> int:
        """Same as ``ImageProcessorConfig.most_tiles``."""
        return 1


def _has_filter(config: OfSeveralTiles, _: attrs.Attribute[Any], value: str) -> None:
    if value == "torch" and config.resample == "lanczos":
        raise ValueError('"torch" has the filters "bicubic" and "bilinear", and resample = "lanczos"')


@attrs.frozen(kw_only=True)
class OfSeveralTiles(OfSquareTiles):
    """What processors have in common that cut a picture into tiles."""

    resampler: Resampler = attrs.field(default="pillow", validator=_has_filter)
    """Who resizes: ``pillow``, with the values of ``transformers``' processors; or ``torch``, several times as fast, by
    the same filter with coarser weights: of smooth pictures, up to 3 % of values are others, by 1 or 2 of 255."""


def _grids(_: object, attribute: attrs.Attribute[Any], value: tuple[Grid, ...]) -> None:
    if not value or any(one < 1 for grid in value for one in grid):
        raise ValueError(f"'{attribute.name}' must name at least one grid, of rows and columns from 1 on: {value!r}")
    if most := [grid for grid in value if math.prod(grid) > _MOST_TILES]:
        raise ValueError(f"'{attribute.name}' may have at most {_MOST_TILES} tiles each, got {list(most[0])}")
    if twice := [grid for grid in value if value.count(grid) > 1]:
        raise ValueError(f"'{attribute.name}' names {list(twice[0])} twice; remove one")


@attrs.frozen(kw_only=True)
class AnyresConfig(OfSeveralTiles):
    """LLaVA-NeXT's "any resolution": the picture as one tile, and then again, larger, on the best of several grids.

    Of these, the one is chosen that keeps most of the picture's pixels, and of those the one that wastes least. What is
    padding has no tokens, and each row of tokens ends with a learned token of its own.
    """

    grids: tuple[Grid, ...] = attrs.field(default=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)), validator=_grids)
    """Rows and columns of tiles to choose from."""

    @property
    def has_newlines(self) -> bool:
        """Same as ``ImageProcessorConfig.has_newlines``."""
        return True

    @property
    def most_tiles(self) -> int:
        """Same as ``ImageProcessorConfig.most_tiles``."""
        return 1 + max(rows * columns for rows, columns in self.grids)

    def grid(self, size: Grid) -> Grid:
        """Rows and columns of tiles of a picture of this size, without the one of the whole."""
        rows, columns = best_resolution(size, [(rows * self.size, columns * self.size) for rows, columns in self.grids])
        return rows // self.size, columns // self.size

    def at_least(self, size: Grid) -> Grid:
        """Same as ``ImageProcessorConfig.at_least``: halves, as long as they leave pixels enough and are whole, since
        tokens depend on the exact shape."""
        rows, columns = self.grid(size)
        inner = fitted(size, (rows * self.size, columns * self.size))
        enough = [max(one, self.size) for one in inner]  # the whole is a tile, too
        height, width = size
        while height % 2 == width % 2 == 0 and height // 2 >= enough[0] and width // 2 >= enough[1]:
            height, width = height // 2, width // 2
        return height, width


@attrs.frozen(kw_only=True)
class TilesConfig(OfSeveralTiles):
    """The picture cut into tiles, row by row, each row ended by a learned token, and then the whole of it as one tile.

    Its longer side becomes as many tiles as it fills, up to ``longest``, and the shorter side as many as then keep its
    shape, rounded up. One that fits into a single tile is that tile alone. (nanoVLM; Idefics 3 enlarges every picture
    to ``longest`` tiles first)
    """

    longest: int = attrs.field(default=4, validator=and_(ge(1), le(32)))
    """The most tiles along a side."""

    @property
    def has_newlines(self) -> bool:
        """Same as ``ImageProcessorConfig.has_newlines``."""
        return True

    @property
    def most_tiles(self) -> int:
        """Same as ``ImageProcessorConfig.most_tiles``."""
        return 1 if self.longest == 1 else self.longest**2 + 1

    def grid(self, size: Grid) -> Grid:
        """Rows and columns of tiles of a picture of this size, without the one of the whole."""
        long, short = max(size), min(size)
        along = min(self.longest, math.ceil(long / self.size))
        across = min(self.longest, max(1, math.ceil(short * along / long)))
        return (along, across) if size[0] >= size[1] else (across, along)

    def at_least(self, size: Grid) -> Grid:
        """Same as ``ImageProcessorConfig.at_least``."""
        rows, columns = self.grid(size)
        return rows * self.size, columns * self.size


def _holds(config: NaflexConfig, _: attrs.Attribute[Any], value: int) -> None:
    if value > (most := (config.size // config.patch) ** 2):
        raise ValueError(
            f"is {value}, and a tile of size = {config.size} holds {most} patches of {config.patch} pixels"
        )


def _of_patches(config: NaflexConfig, _: attrs.Attribute[Any], value: int) -> None:
    if config.size % value:
        raise ValueError(f"must divide size = {config.size}, it is {value}")


@attrs.frozen(kw_only=True)
class NaflexConfig(OfSquareTiles):
    """A picture in its own shape, as large as ``max_patches`` allow, at the upper left of a tile; the rest of the tile
    is padding, of which the encoder is told and which has no tokens. (SigLIP 2, NaFlex)

    The larger ``size`` is beside ``max_patches``, the longer pictures may be, and the more padding there is.
    """

    size: int = attrs.field(default=512, validator=ge(1))
    """Height and width of the padded tile in pixels."""
    patch: int = attrs.field(default=16, validator=[ge(1), _of_patches])
    """Height and width of the encoder's patches in pixels."""
    max_patches: int = attrs.field(default=256, validator=[ge(1), _holds])
    """The most patches that a picture becomes."""

    def picture_size(self, size: Grid) -> Grid:
        """Height and width that a picture of this size has in the tile."""
        return patched_size(size, self.patch, self.max_patches, self.size)

    def at_least(self, size: Grid) -> Grid:
        """Same as ``ImageProcessorConfig.at_least``."""
        return self.picture_size(size)

    @property
    def pads(self) -> bool:
        """Same as ``ImageProcessorConfig.pads``."""
        return True

    @property
    def most_tiles(self) -> int:
        """Same as ``ImageProcessorConfig.most_tiles``."""
        return 1
