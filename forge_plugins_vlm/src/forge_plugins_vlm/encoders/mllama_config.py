"""What can be set for the encoder ``mllama``. Nothing here may import torch."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import and_, ge, gt, le

from forge_plugins_vlm.contracts.vision_encoder import Grid, VisionEncoderConfig
from forge_plugins_vlm.encoders.architectures import HiddenAct
from forge_plugins_vlm.encoders.transformers_config import CLIP

_TILES = 4
_RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


def _divides_hidden_size(one: MllamaArchitecture, _: attrs.Attribute[int], value: int) -> None:
    if one.hidden_size % value:
        raise ValueError(f"must divide hidden_size = {one.hidden_size}, got {value}")


def _are_layers(one: MllamaArchitecture, _: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
    if any(not 0 <= layer < one.num_hidden_layers for layer in value):
        raise ValueError(f"must be of the layers 0 to {one.num_hidden_layers - 1}, got {[*value]}")


def _fit(one: MllamaArchitecture, _: attrs.Attribute[Any], value: tuple[Grid, ...]) -> None:
    for rows, columns in value:
        if not 1 <= rows * columns <= one.max_num_tiles:
            raise ValueError(f"must have 1 to max_num_tiles = {one.max_num_tiles} parts, got {[rows, columns]}")
    if value == _RATIOS and one.max_num_tiles != _TILES:
        raise ValueError(f"must be others than the default, which is for max_num_tiles = {_TILES}")


@attrs.frozen(kw_only=True)
class MllamaArchitecture:
    """Sizes of the vision tower of Llama 3.2 Vision; the defaults are those of the 11B model."""

    hidden_size: int = attrs.field(default=1280, validator=gt(0))
    """Width of a layer."""
    num_hidden_layers: int = attrs.field(default=32, validator=and_(ge(1), le(10_000)))
    """Layers over the parts of a picture."""
    num_global_layers: int = attrs.field(default=8, validator=and_(ge(0), le(10_000)))
    """Layers behind them, which add what they find by learned gates."""
    attention_heads: int = attrs.field(default=16, validator=[gt(0), _divides_hidden_size])
    """Heads of attention in each."""
    intermediate_size: int = attrs.field(default=5120, validator=gt(0))
    """Width of the hidden layer of an MLP."""
    patch_size: int = attrs.field(default=14, validator=gt(0))
    """Height and width of the pixels that become a feature."""
    image_size: int = attrs.field(default=560, validator=gt(0))
    """Height and width of a part, in pixels."""
    hidden_act: HiddenAct = "gelu"
    """Activation of the MLPs: exact, by tanh, or ``x · sigmoid(1.702 x)``."""
    norm_eps: float = attrs.field(default=1e-5, validator=gt(0.0))
    """Added to the variance in norms of layers."""
    intermediate_layers_indices: tuple[int, ...] = attrs.field(default=(3, 7, 15, 23, 30), validator=_are_layers)
    """Layers, from 0, whose hidden states stand beside the last ones in a feature."""
    max_num_tiles: int = attrs.field(default=_TILES, validator=ge(1))
    """The most parts of a picture; there are always as many, some of them empty."""
    supported_aspect_ratios: tuple[Grid, ...] = attrs.field(default=_RATIOS, validator=_fit)
    """Rows and columns of parts; each of them has learned positions of its own."""


@attrs.frozen(kw_only=True)
class MllamaConfig(VisionEncoderConfig):
    """The vision tower of Llama 3.2 Vision (Grattafiori et al. 2024, arXiv 2407.21783). A tile is a whole picture here,
    which the tower cuts into parts that see each other."""

    normalisation = CLIP

    architecture: MllamaArchitecture = attrs.field(factory=MllamaArchitecture)
    """Its sizes. Weights are random, or of a converted model."""
    size: tuple[int, int] | None = None
    """Height and width of a tile in pixels, multiples of ``architecture.image_size``; by default it is one part."""

    @property
    def dim(self) -> int:
        """Same as ``VisionEncoderConfig.dim``."""
        return self.architecture.hidden_size * (1 + len(self.architecture.intermediate_layers_indices))

    @property
    def tile_size(self) -> Grid:
        """Same as ``VisionEncoderConfig.tile_size``."""
        return self.size or (self.architecture.image_size, self.architecture.image_size)

    def grid(self, height: int, width: int) -> Grid:
        """Same as ``VisionEncoderConfig.grid``: one row, as each part has a class token as well."""
        rows, columns = self.parts(height, width)
        return 1, rows * columns * self.n_positions

    def parts(self, height: int, width: int) -> Grid:
        """Rows and columns of the parts of a tile.

        Raises:
            ValueError: it takes no such tiles.
        """
        own = self.architecture
        rows, columns = height // own.image_size, width // own.image_size
        if (height, width) != self.tile_size or (rows, columns) not in own.supported_aspect_ratios:
            known = ", ".join(f"{one[0]} × {one[1]}" for one in own.supported_aspect_ratios)
            raise ValueError(
                f"the encoder takes tiles of {self.tile_size[0]} × {self.tile_size[1]} pixels, and not of {height} × "
                f"{width}; size is {known} parts of {own.image_size} pixels"
            )
        if (height % own.image_size, width % own.image_size) != (0, 0):
            raise ValueError(f"size must be multiples of image_size = {own.image_size}, got {height} × {width}")
        return rows, columns

    @property
    def n_positions(self) -> int:
        """Patches of a part, and its class token."""
        return (self.architecture.image_size // self.architecture.patch_size) ** 2 + 1

    def flops(self, height: int, width: int) -> float:
        """Same as ``VisionEncoderConfig.flops``."""
        own = self.architecture
        positions = own.max_num_tiles * self.n_positions
        layer = 4 * own.hidden_size**2 + 2 * own.hidden_size * own.intermediate_size
        n_layers = own.num_hidden_layers + own.num_global_layers
        patches = 2.0 * positions * 3 * own.patch_size**2 * own.hidden_size
        return patches + n_layers * positions * (2.0 * layer + 4.0 * own.hidden_size * positions)
