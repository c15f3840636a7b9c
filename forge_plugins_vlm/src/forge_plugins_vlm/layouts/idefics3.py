"""The weight layouts of Idefics3 and SmolVLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from forge_core.errors import ConfigError
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.connectors.pooling_config import PixelShuffleConfig
from forge_plugins_vlm.encoders.architectures import SiglipArchitecture
from forge_plugins_vlm.encoders.transformers_config import SiglipConfig
from forge_plugins_vlm.encoders.vision_folder import Normalisation
from forge_plugins_vlm.fusions.config import JointDecoderConfig
from forge_plugins_vlm.layouts.layout import Table, VisionLanguageLayout, named
from forge_plugins_vlm.layouts.tower import check_counts, checked_encoder, sizes_from_hf, tower_names, tower_to_hf

_TOWER = "model.vision_model"
_PROJECTION = "model.connector.modality_projection.proj.weight"
_DEFAULTS = attrs.asdict(SiglipArchitecture(hidden_size=1152, num_attention_heads=16, patch_size=32))


class Idefics3Layout(VisionLanguageLayout):
    """Idefics3: SigLIP with the norm behind its last layer, the features of a square side by side, one matrix."""

    architectures = ("Idefics3ForConditionalGeneration",)
    model_type = "idefics3"
    vision_type: ClassVar[str] = "idefics3_vision"
    image_key = "image_token_id"
    decoder: ClassVar[Mapping[str, str]] = {"model.": "model.text_model."}

    def read(self, hf: Mapping[str, Any], vision: Mapping[str, Any]) -> Table:
        name, sizes = self.architectures[0], sizes_from_hf(vision, _DEFAULTS, self.architectures[0])
        vision.get("model_type")
        check_counts(name, "", {"scale_factor": (scale := hf.get("scale_factor", 2))})
        side = sizes["image_size"] // sizes["patch_size"]
        if not _has_plain_positions(side):
            raise ConfigError(
                f"{name} with {side} patches along the side of a tile is not supported: rounding in transformers gives "
                "some of them the position of a neighbour"
            )
        return {
            "encoder": {"name": "siglip", "architecture": sizes},
            "connector": {"name": "pixel_shuffle", "scale": scale, "bias": False},
            "fusion": {"name": "joint_decoder"},
        }

    def write(self, config: VisionLanguageConfig) -> Table:
        name, connector, fusion = self.architectures[0], config.connector.config, config.fusion.config
        if fusion != JointDecoderConfig():
            raise ConfigError(f"{name} has the fusion joint_decoder without any of its keys")
        if not isinstance(connector, PixelShuffleConfig) or connector.n_layers != 1 or connector.bias:
            raise ConfigError(f"{name} has a connector pixel_shuffle of one matrix without a bias")
        if config.newline:
            raise ConfigError(f"{name} has no learned token that ends rows of an image")
        encoder = checked_encoder(config, name, SiglipConfig)
        if encoder.feature_layer != -1:
            raise ConfigError(f"{name} reads the last layer of siglip, and feature_layer is {encoder.feature_layer}")
        side = encoder.grid(*encoder.tile_size)[0]
        if not _has_plain_positions(side):
            raise ConfigError(f"{name} would give some of {side} patches along a side the position of a neighbour")
        return {
            "vision_config": tower_to_hf(encoder, self.vision_type, encoder.depth),
            "scale_factor": connector.scale,
        }

    def vision_names(self, config: VisionLanguageConfig) -> dict[str, str]:
        names = named("vision.encoder", _TOWER, tower_names(config.encoder.config))
        return names | {"vision.connector.projection.layers.0.weight": _PROJECTION}

    def normalisation(self, table: Mapping[str, Any]) -> Normalisation:
        return SiglipConfig.usual

    def is_unused(self, config: VisionLanguageConfig, name: str) -> bool:
        return super().is_unused(config, name) or name == f"{_TOWER}.embeddings.position_ids"

    def pictures(self, hf: Mapping[str, Any], table: Mapping[str, Any]) -> Table:
        sizes = table["encoder"]["architecture"]
        side = sizes["image_size"] // sizes["patch_size"] // table["connector"]["scale"]
        processor = {"name": "square", "size": sizes["image_size"], "resample": "lanczos"}
        return {"processor": processor, "token_grid": [side, side]}


class SmolVLMLayout(Idefics3Layout):
    """SmolVLM 2: the same under another name. The first SmolVLM calls itself Idefics3."""

    architectures = ("SmolVLMForConditionalGeneration",)
    model_type = "smolvlm"
    vision_type = "smolvlm_vision"
    order = 2


def _has_plain_positions(side: int) -> bool:
    """Whether the fp32 sums by which ``Idefics3VisionEmbeddings`` of transformers 5 numbers the patches along a side
    count them one by one."""
    import torch  # its sums decide; forge validate does without, but for models of this architecture

    borders = torch.arange(1 / side, 1.0, 1 / side)
    at = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor([side]))).clamp(max=1 - 1e-6)
    return torch.bucketize(at, borders, right=True).tolist() == list(range(side))
