"""What can be set for the encoder ``conv_vit``."""

from __future__ import annotations

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, le

from forge_plugins_vlm.contracts.vision_encoder import Grid, VisionEncoderConfig


def _is_power_of_two(_: object, __: attrs.Attribute[int], value: int) -> None:
    if value < 2 or value & (value - 1):
        raise ValueError(f"must be a power of two, 2 at least, as each convolution halves the picture; got {value}")


def _divides_dim(config: ConvViTConfig, _: attrs.Attribute[int], value: int) -> None:
    if config.dim % value:
        raise ValueError(f"must divide dim = {config.dim}, got {value}")


def _fits_the_stem(config: ConvViTConfig, _: attrs.Attribute[int], value: int) -> None:
    if value % (config.patch // 2):
        raise ValueError(
            f"must be a multiple of patch / 2 = {config.patch // 2}, as convolutions double their channels; got {value}"
        )


def _is_whole_patches(config: ConvViTConfig, _: attrs.Attribute[Grid], value: Grid) -> None:
    for side in value:
        if side % config.patch:
            raise ValueError(f"must be multiples of patch = {config.patch}, got {list(value)}")


@attrs.frozen(kw_only=True)
class ConvViTConfig(VisionEncoderConfig):
    """A small vision transformer behind convolutions (Xiao et al. 2021, arXiv 2106.14881), to be trained from nothing.
    The defaults are enough for pictures of 32 × 32 pixels: 16 features of width 64.

    It takes padded tiles.
    """

    patch: int = attrs.field(default=8, validator=_is_power_of_two)
    """Height and width of the pixels that become a feature; the stem has ``log2(patch)`` convolutions of stride 2."""
    dim: int = attrs.field(default=64, validator=[gt(0), _fits_the_stem])
    """Width of a feature."""
    size: tuple[int, int] = attrs.field(default=(32, 32), validator=[deep_iterable(gt(0)), _is_whole_patches])
    """Height and width of a tile, in pixels. Each feature of it has a position that is learned."""
    any_size: bool = False
    """Take tiles of other sizes too; positions are then interpolated from those of ``size``."""
    n_layers: int = attrs.field(default=2, validator=and_(ge(1), le(10_000)))
    """Transformer layers."""
    n_heads: int = attrs.field(default=4, validator=[gt(0), _divides_dim])
    """Heads of attention in each."""
    mlp_ratio: int = attrs.field(default=4, validator=gt(0))
    """Width of the hidden layer of an MLP, in units of ``dim``."""

    @property
    def tile_size(self) -> Grid | None:
        """Same as ``VisionEncoderConfig.tile_size``."""
        return None if self.any_size else self.size

    @property
    def usual_tile(self) -> Grid:
        """Same as ``VisionEncoderConfig.usual_tile``."""
        return self.size

    @property
    def heads_to_cut(self) -> int:
        """Same as ``VisionEncoderConfig.heads_to_cut``."""
        return self.n_heads

    @property
    def takes_padding(self) -> bool:
        """Same as ``VisionEncoderConfig.takes_padding``."""
        return True

    def grid(self, height: int, width: int) -> Grid:
        """Same as ``VisionEncoderConfig.grid``."""
        if not self.any_size and (height, width) != self.size:
            raise ValueError(
                f"conv_vit takes tiles of {self.size[0]} × {self.size[1]} pixels (size), not {height} × {width}, "
                "unless any_size = true"
            )
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"conv_vit takes tiles of multiples of patch = {self.patch} pixels, and not of {height} × {width}"
            )
        return height // self.patch, width // self.patch

    def flops(self, height: int, width: int) -> float:
        """Same as ``VisionEncoderConfig.flops``."""
        rows, columns = self.grid(height, width)
        features = rows * columns
        total, cells, channels = 0.0, height * width, 3
        for wider in self.channels:
            cells //= 4
            total += 2.0 * cells * 9 * channels * wider
            channels = wider
        total += 2.0 * features * self.dim**2
        layer = (4 + 2 * self.mlp_ratio) * self.dim**2
        return total + self.n_layers * features * (2.0 * layer + 4.0 * self.dim * features)

    @property
    def channels(self) -> list[int]:
        """Of what each convolution of stride 2 gives: ``dim`` in the last, and half as many in each before it."""
        n_halvings = self.patch.bit_length() - 1
        return [self.dim >> (n_halvings - 1 - number) for number in range(n_halvings)]
