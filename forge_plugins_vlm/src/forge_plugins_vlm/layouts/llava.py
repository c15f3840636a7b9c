"""The weight layouts of LLaVA 1.5 and LLaVA-NeXT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import attrs

from forge_core.errors import ConfigError
from forge_plugins_hf.config_json import part_of
from forge_plugins_hf.weight_layout import Recipe
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.connectors.linear_config import MLPConnectorConfig
from forge_plugins_vlm.encoders.transformers_config import ClassTokenConfig, ClipConfig, FixedSizeConfig, SiglipConfig
from forge_plugins_vlm.encoders.vision_folder import Normalisation
from forge_plugins_vlm.fusions.config import JointDecoderConfig
from forge_plugins_vlm.images.config import AnyresConfig
from forge_plugins_vlm.layouts.layout import Table, VisionLanguageLayout, constant, named
from forge_plugins_vlm.layouts.tower import checked_encoder, tower_from_hf, tower_names, tower_to_hf

_TOWER, _PROJECTOR = "vision_tower.vision_model", "multi_modal_projector"
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "relu": "relu"}
"""Theirs, and ours."""


class LlavaLayout(VisionLanguageLayout):
    """LLaVA 1.5: CLIP or SigLIP, two matrices, and the decoder."""

    architectures = ("LlavaForConditionalGeneration",)
    model_type = "llava"
    has_newline: ClassVar[bool] = False
    decoder: ClassVar[Mapping[str, str]] = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    remembered: ClassVar[Mapping[str, str]] = {"language_model.model.": "model.language_model."}
    older: ClassVar[Mapping[str, str]] = {
        # transformers 5 writes the tower so
        "vision_tower.": f"{_TOWER}.",
        f"{_TOWER}.": f"{_TOWER}.",
        # and calls all of it so in memory
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": f"{_TOWER}.",
        f"model.{_TOWER}.": f"{_TOWER}.",
        f"model.{_PROJECTOR}.": f"{_PROJECTOR}.",
        "model.image_newline": "image_newline",
    }

    def read(self, hf: Mapping[str, Any], vision: Mapping[str, Any]) -> Table:
        hf.get("image_seq_length")  # follows from the encoder
        if (activation := hf.get("projector_hidden_act", "gelu")) not in _ACTIVATIONS:
            raise ConfigError(
                f"{self.architectures[0]} with projector_hidden_act = {activation!r} is not supported; "
                f"{', '.join(_ACTIVATIONS)} are"
            )
        keys: Table = {} if activation == "gelu" else {"activation": _ACTIVATIONS[activation]}
        keys |= {} if hf.get("multimodal_projector_bias", True) else {"bias": False}
        return {
            "encoder": self._encoder(hf, vision),
            "connector": {"name": "mlp", "n_layers": 2, **keys},
            "fusion": {"name": "joint_decoder"},
            **({"newline": True} if self.has_newline else {}),
        }

    def write(self, config: VisionLanguageConfig) -> Table:
        name, connector, fusion = self.architectures[0], config.connector.config, config.fusion.config
        if fusion != JointDecoderConfig():
            raise ConfigError(f"{name} has the fusion joint_decoder without any of its keys")
        if not isinstance(connector, MLPConnectorConfig) or connector.n_layers != 2:
            raise ConfigError(f"{name} has a connector mlp of two matrices")
        if connector.hidden_dim not in (None, config.dim):
            raise ConfigError(
                f"{name} has a connector of the decoder's width {config.dim}; connector.hidden_dim is "
                f"{connector.hidden_dim}"
            )
        if config.newline != self.has_newline:
            raise ConfigError(
                f"{name} has {'a' if self.has_newline else 'no'} learned token that ends rows of an image"
            )
        encoder = self._checked(config)
        is_clip = isinstance(encoder, ClipConfig)
        vision = tower_to_hf(encoder, "clip_vision_model" if is_clip else "siglip_vision_model", encoder.depth)
        return {
            "vision_config": vision if is_clip else {**vision, "vision_use_head": False},
            "vision_feature_layer": -1,  # layers behind it are not there
            "vision_feature_select_strategy": "default" if getattr(encoder, "cls", "keep") == "drop" else "full",
            "projector_hidden_act": next(hf for hf, ours in _ACTIVATIONS.items() if ours == connector.activation),
            "multimodal_projector_bias": connector.bias,
            "image_seq_length": connector.num_tokens(encoder.grid(*encoder.tile_size)),
        }

    def vision_names(self, config: VisionLanguageConfig) -> dict[str, str]:
        keys = ("weight", "bias") if config.connector.config.bias else ("weight",)
        names = named("vision.encoder", _TOWER, tower_names(config.encoder.config))
        for number in range(2):
            names |= named(f"vision.connector.layers.{number}", f"{_PROJECTOR}.linear_{number + 1}", keys)
        return names | ({"vision.newline": "image_newline"} if self.has_newline else {})

    def normalisation(self, table: Mapping[str, Any]) -> Normalisation:
        return ClipConfig.usual if table["encoder"]["name"] == "clip" else SiglipConfig.usual

    def constants(self, config: VisionLanguageConfig) -> Mapping[str, Recipe]:
        """The norm behind the tower, which is of other uses of it."""
        width = config.encoder.config.dim
        return {f"{_TOWER}.post_layernorm.{key}": constant(width, value) for key, value in (("weight", 1), ("bias", 0))}

    def is_unused(self, config: VisionLanguageConfig, name: str) -> bool:
        return super().is_unused(config, name) or _is_behind(name, config.encoder.config.depth)

    def ties(self, hf: Mapping[str, Any]) -> bool:
        return super().ties(hf) or super().ties(part_of(hf, "text_config"))

    def pictures(self, hf: Mapping[str, Any], table: Mapping[str, Any]) -> Table:
        sizes = table["encoder"]["architecture"]
        side = sizes["image_size"] // sizes["patch_size"]
        grid = [1, side**2 + 1] if table["encoder"].get("cls") == "keep" else [side, side]
        return {"processor": self._processor(hf, table["encoder"]), "token_grid": grid}

    def _processor(self, hf: Mapping[str, Any], encoder: Table) -> Table:
        fit = "crop" if encoder["name"] == "clip" else "stretch"
        return {"name": "square", "size": encoder["architecture"]["image_size"], "fit": fit}

    def _encoder(self, hf: Mapping[str, Any], vision: Mapping[str, Any]) -> Table:
        name, (encoder, sizes) = self.architectures[0], tower_from_hf(vision, self.architectures[0])
        n_layers, layer = sizes["num_hidden_layers"], hf.get("vision_feature_layer", -2)
        if not isinstance(layer, int) or not 1 <= (depth := layer if layer >= 0 else n_layers + 1 + layer) <= n_layers:
            raise ConfigError(
                f"{name} with vision_feature_layer = {layer!r} is not supported; one of {n_layers} of the tower is"
            )
        strategy = hf.get("vision_feature_select_strategy", "default")
        if encoder == "siglip" and strategy != "full":
            raise ConfigError(
                f"{name} with vision_feature_select_strategy = {strategy!r} leaves out a patch of siglip_vision_model, "
                "which has no class token; only 'full' is supported"
            )
        table: Table = {"name": encoder, "architecture": sizes, "feature_layer": depth - n_layers - 1}
        if encoder == "clip":
            return {**table, "cls": "drop" if strategy == "default" else "keep"}
        if depth == n_layers:  # as theirs, it has no norm behind it, and our last one has: make it the one before
            table |= {"architecture": {**sizes, "num_hidden_layers": n_layers + 1}, "feature_layer": -2}
        return table

    def _checked(self, config: VisionLanguageConfig) -> FixedSizeConfig:
        name = self.architectures[0]
        encoder = checked_encoder(config, name, ClipConfig, SiglipConfig)
        if isinstance(encoder, SiglipConfig) and encoder.feature_layer == -1:
            raise ConfigError(
                f"{name} reads features before the last norm of siglip; model.encoder.feature_layer is -1"
            )
        return encoder


class LlavaNextLayout(LlavaLayout):
    """LLaVA-NeXT: pictures of any resolution (the image processor ``anyres``), whose rows end in a learned token."""

    architectures = ("LlavaNextForConditionalGeneration",)
    model_type = "llava_next"
    has_newline = True

    def read(self, hf: Mapping[str, Any], vision: Mapping[str, Any]) -> Table:
        table = super().read(hf, vision)
        self._grids(hf, table["encoder"]["architecture"]["image_size"])
        if table["encoder"].get("cls") == "keep":
            raise ConfigError(
                f"{self.architectures[0]} with vision_feature_select_strategy = 'full' is not supported beside "
                "clip_vision_model: features with a class token are no grid"
            )
        return table

    def write(self, config: VisionLanguageConfig) -> Table:
        encoder = config.encoder.config
        if isinstance(encoder, ClassTokenConfig) and encoder.cls == "keep":
            raise ConfigError(f"{self.architectures[0]} has no class token among its features; set model.encoder.cls")
        table = super().write(config)
        return self._with_grids(table, attrs.fields(AnyresConfig).grids.default, encoder.tile_size[0])

    def with_source(self, table: Table, source: Any) -> Table:
        processor = source.processor.config
        if not isinstance(processor, AnyresConfig):
            return table
        return self._with_grids(table, processor.grids, processor.size)

    def _processor(self, hf: Mapping[str, Any], encoder: Table) -> Table:
        size = encoder["architecture"]["image_size"]
        return {"name": "anyres", "size": size, "grids": self._grids(hf, size)}

    def _grids(self, hf: Mapping[str, Any], size: int) -> list[list[int]]:
        default = self._with_grids({}, attrs.fields(AnyresConfig).grids.default, 336)["image_grid_pinpoints"]
        found = cast("list[list[int]]", hf.get("image_grid_pinpoints") or default)
        for pixels in found:
            if any(side % size for side in pixels):
                raise ConfigError(
                    f"{self.architectures[0]} with image_grid_pinpoints of {pixels} is not supported; sides are "
                    f"multiples of vision_config.image_size = {size}"
                )
        return [[height // size, width // size] for height, width in found]

    def _with_grids(self, table: Table, grids: Any, size: int) -> Table:
        return {**table, "image_grid_pinpoints": [[rows * size, columns * size] for rows, columns in grids]}


def _is_behind(name: str, depth: int) -> bool:
    """Whether a tensor of the tower is of what is behind its features, or of the numbers of positions."""
    if not name.startswith(f"{_TOWER}."):
        return False
    within = name.removeprefix(f"{_TOWER}.")
    if within.startswith("encoder.layers."):
        return int(within.split(".")[2]) >= depth
    return within.startswith(("post_layernorm.", "head.")) or within == "embeddings.position_ids"
