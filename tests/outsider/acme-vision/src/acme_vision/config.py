"""The keys of this package's components. Nothing here may import torch or PIL."""

from typing import ClassVar

import attrs
from attrs.validators import gt

from forge_plugins_vlm.contracts.connector import ConnectorConfig
from forge_plugins_vlm.contracts.fusion import FusionConfig
from forge_plugins_vlm.contracts.image_processor import ImageProcessorConfig
from forge_plugins_vlm.contracts.vision_encoder import VisionEncoderConfig


@attrs.frozen(kw_only=True)
class PatchMixerConfig(VisionEncoderConfig):
    """Keys of the encoder ``patch_mixer``."""

    size: int = attrs.field(default=32, validator=gt(0))
    """Height and width of a tile in pixels."""
    patch: int = attrs.field(default=8, validator=gt(0))
    """Height and width of a patch in pixels."""
    dim: int = attrs.field(default=32, validator=gt(0))
    """Width of a feature."""
    n_layers: int = attrs.field(default=2, validator=gt(0))
    """Layers."""

    @property
    def tile_size(self):
        return self.size, self.size

    def grid(self, height, width):
        if (height, width) != self.tile_size or self.size % self.patch:
            raise ValueError(f"patch_mixer takes tiles of size = {self.size} pixels, in patches of {self.patch}")
        return self.size // self.patch, self.size // self.patch

    def flops(self, height, width):
        features = (self.size // self.patch) ** 2
        layer = 2.0 * features * self.dim * (features + self.dim)
        return 2.0 * features * 3 * self.patch**2 * self.dim + self.n_layers * layer


@attrs.frozen(kw_only=True)
class RowPoolConfig(ConnectorConfig):
    """The connector ``row_pool`` has no keys."""

    def grid(self, features):
        return features[0], 1


@attrs.frozen(kw_only=True)
class GatedPrefixConfig(FusionConfig):
    """Keys of the fusion ``gated_prefix``."""

    places_tokens: ClassVar[bool] = False

    from_layer: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """The first layer that looks at images; those before it read text alone."""
    gate: float = 0.0
    """What gates begin with; at 0 the model begins as the decoder alone."""

    def check(self, job):
        yield from super().check(job)
        model, n_layers = job.model.config, job.model.config.n_layers
        if self.from_layer >= n_layers:
            yield "from_layer", f"is {self.from_layer}, and the last layer is {n_layers - 1}"
        if any(model.layer(number).mixer is not None for number in range(n_layers)):
            yield "", "images are keys of the decoder's usual attention; remove mixer"


@attrs.frozen(kw_only=True)
class HalvesConfig(ImageProcessorConfig):
    """Keys of the image processor ``halves``."""

    size: int = attrs.field(default=32, validator=gt(0))
    """Height and width of a tile in pixels."""

    @property
    def tile_size(self):
        return self.size, self.size

    @property
    def depends_on_size(self):
        return False

    @property
    def most_tiles(self):
        return 2
