"""The weight layout of Llama 3.2 Vision."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import attrs

from forge_core.errors import ConfigError
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.connectors.linear_config import LinearConfig
from forge_plugins_vlm.encoders.mllama_config import MllamaArchitecture, MllamaConfig
from forge_plugins_vlm.encoders.vision_folder import Normalisation
from forge_plugins_vlm.fusions.config import CrossAttentionConfig
from forge_plugins_vlm.layouts.layout import Table, VisionLanguageLayout, named
from forge_plugins_vlm.layouts.tower import check_counts

_BEGIN = 128_000
_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
_TEXT_DEFAULTS = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_VISION_DEFAULTS = attrs.asdict(MllamaArchitecture(image_size=448))
_CROSS = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.{one}.weight": f"cross_attn.{one}_proj.weight" for one in ("q", "k", "v", "o")},
    **{f"attention.{one}.weight": f"cross_attn.{one}.weight" for one in ("q_norm", "k_norm")},
    **{f"feed_forward.{one}.weight": f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")},
    "attention_gate.weight": "cross_attn_attn_gate",
    "feed_forward_gate.weight": "cross_attn_mlp_gate",
}
"""Parameters of a layer that looks at images."""
_VISION_LAYER = (
    *(f"self_attn.{one}_proj.weight" for one in ("q", "k", "v", "o")),
    *(f"{one}.{key}" for one in ("mlp.fc1", "mlp.fc2") for key in ("weight", "bias")),
    *(f"{one}.{key}" for one in ("input_layernorm", "post_attention_layernorm") for key in ("weight", "bias")),
)
_VISION = (
    *("class_embedding", "patch_embedding.weight", "gated_positional_embedding.embedding"),
    *("gated_positional_embedding.gate", "gated_positional_embedding.tile_embedding.weight"),
    *(f"{one}_tile_positional_embedding.{key}" for one in ("pre", "post") for key in ("embedding.weight", "gate")),
    *(f"layernorm_{one}.{key}" for one in ("pre", "post") for key in ("weight", "bias")),
)


class MllamaLayout(VisionLanguageLayout):
    """Llama 3.2 Vision: layers that look at images in place of some of the decoder's."""

    architectures = ("MllamaForConditionalGeneration",)
    model_type = "mllama"
    families = ("llama",)
    input_tokens = 8
    decoder: ClassVar[Mapping[str, str]] = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    remembered: ClassVar[Mapping[str, str]] = {"language_model.model.": "model.language_model."}
    older: ClassVar[Mapping[str, str]] = {
        # as transformers 5 calls them in memory
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "model.vision_model.": "vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }

    def text_of(self, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        """Same as ``VisionLanguageLayout.text_of``: a Llama, but for what it does with images."""
        text = super().text_of(hf)
        for key in ("cross_attention_layers", "model_type"):
            text.get(key)
        if text.get("dropout", 0.0):
            raise ConfigError(f"{self.architectures[0]} with text_config.dropout is not supported; only 0.0 is")
        return ChainMap({"model_type": "llama"}, cast("Table", text), _TEXT_DEFAULTS)

    def read(self, hf: Mapping[str, Any], vision: Mapping[str, Any]) -> Table:
        text, name = self.text_of(hf), self.architectures[0]
        sizes = {key: vision.get(key, default) for key, default in _VISION_DEFAULTS.items()}
        check_counts(name, "vision_config.", {key: sizes[key] for key in ("image_size", "patch_size")})
        for key in ("initializer_range", "model_type"):
            vision.get(key)
        width = sizes["hidden_size"] * (1 + len(sizes["intermediate_layers_indices"]))
        for key, supported in (("num_channels", 3), ("vision_output_dim", width)):
            if vision.get(key, supported) != supported:
                raise ConfigError(
                    f"{name} with vision_config.{key} = {vision[key]!r} is not supported; only {supported} is"
                )
        n_layers, found = text["num_hidden_layers"], text.get("cross_attention_layers") or _LAYERS
        return {
            "vocab_size": text["vocab_size"] + self.input_tokens,
            "input_tokens": self.input_tokens,
            "encoder": {"name": "mllama", "architecture": sizes},
            "connector": {"name": "linear"},
            "fusion": {
                "name": "cross_attention",
                "place": "replace",
                "layers": [one for one in found if one < n_layers],
                "norm_images": False,
            },
        }

    def write(self, config: VisionLanguageConfig) -> Table:
        name, fusion, encoder = self.architectures[0], config.fusion.config, config.encoder.config
        if not isinstance(fusion, CrossAttentionConfig) or fusion.place != "replace" or fusion.attend != "latest":
            raise ConfigError(f'{name} has the fusion cross_attention with place = "replace" and attend = "latest"')
        if fusion.gate_scale != 1 or not fusion.gated:
            given = f"gate_scale is {fusion.gate_scale:g}" if fusion.gated else "gated is false"
            raise ConfigError(f"{name} has gates tanh(g); fusion.{given}")
        if fusion.heads_of(config)[:2] != (config.n_heads, config.kv_heads):
            raise ConfigError(f"{name} looks at images with as many heads as at text; remove those of fusion")
        if fusion.norm_images:
            raise ConfigError(f"{name} has no norm of image tokens; fusion.norm_images is true")
        if not isinstance(encoder, MllamaConfig) or not isinstance(config.connector.config, LinearConfig):
            raise ConfigError(f"{name} has an encoder mllama and a connector linear")
        if config.newline:
            raise ConfigError(f"{name} has no learned token that ends rows of an image")
        if config.has_dropout or getattr(config.feed_forward.config, "bias", False):
            raise ConfigError(f"{name} has no dropout, and no biases in feed-forward layers")
        if config.head_size * config.n_heads != config.dim or config.attention_bias != "none" or config.qk_norm:
            raise ConfigError(f"{name} has heads of dim / n_heads, without biases or norms")
        return {
            "vision_config": {
                **attrs.asdict(encoder.architecture),
                "model_type": "mllama_vision_model",
                "num_channels": 3,
                "vision_output_dim": encoder.dim,
            },
        }

    def config_json(self, config: VisionLanguageConfig, vocab_size: int) -> Table:
        table = super().config_json(config, vocab_size)
        layers = config.fusion.config.layers_of(config.n_layers)
        text = {
            **table["text_config"],
            "model_type": "mllama_text_model",
            "vocab_size": vocab_size - self.input_tokens,
            "cross_attention_layers": [*layers],
            "bos_token_id": _BEGIN if vocab_size > _BEGIN else 0,  # transformers asks for a number
        }
        return {**table, "text_config": text}

    def decoder_names(self, config: VisionLanguageConfig) -> dict[str, str]:
        """Same as ``VisionLanguageLayout.decoder_names``, with layers that look at images."""
        looking = config.fusion.config.layers_of(config.n_layers)
        without = tuple(f"blocks.{number}." for number in looking)
        names = {ours: theirs for ours, theirs in super().decoder_names(config).items() if not ours.startswith(without)}
        for number in looking:
            names |= named(f"blocks.{number}", f"language_model.model.layers.{number}", _CROSS)
        return names

    def vision_names(self, config: VisionLanguageConfig) -> dict[str, str]:
        sizes = config.encoder.config.architecture
        names = named("vision.encoder", "vision_model", _VISION)
        gates = ("gate_attn", "gate_ffn")
        for ours, theirs, number, keys in (
            ("layers", "transformer", sizes.num_hidden_layers, _VISION_LAYER),
            ("global_layers", "global_transformer", sizes.num_global_layers, (*_VISION_LAYER, *gates)),
        ):
            for one in range(number):
                names |= named(f"vision.encoder.{ours}.{one}", f"vision_model.{theirs}.layers.{one}", keys)
        return names | named("vision.connector.layers.0", "multi_modal_projector", ("weight", "bias"))

    def normalisation(self, table: Mapping[str, Any]) -> Normalisation:
        return MllamaConfig.normalisation

    def pictures(self, hf: Mapping[str, Any], table: Mapping[str, Any]) -> Table:
        sizes = table["encoder"]["architecture"]
        return {
            "processor": {"name": "square", "size": sizes["image_size"], "resample": "bilinear"},
            "token_grid": [1, (sizes["image_size"] // sizes["patch_size"]) ** 2 + 1],
            "one_token_an_image": True,
        }
