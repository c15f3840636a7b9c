"""The vision tower of a model of Hugging Face: CLIP or SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.encoders.architectures import ClipArchitecture, SiglipArchitecture
from forge_plugins_vlm.encoders.transformers_config import ClipConfig, FixedSizeConfig, SiglipConfig

Table = dict[str, Any]

_ENCODERS = {
    "clip_vision_model": ("clip", attrs.asdict(ClipArchitecture())),
    "siglip_vision_model": ("siglip", attrs.asdict(SiglipArchitecture())),
}
"""By ``model_type``: our encoder, and what ``vision_config`` leaves out."""
_NOT_OF_FEATURES = (
    *("initializer_factor", "initializer_range", "max_image_size", "projection_dim", "size", "tie_word_embeddings"),
    *("use_base_siglip", "vision_use_head", "vocab_size"),
)
"""Keys of ``vision_config`` that change no feature."""
_NORMS = ("layer_norm1", "layer_norm2")
_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")


def tower_from_hf(vision: Mapping[str, Any], architecture: str) -> tuple[str, Table]:
    """The encoder's name, and its sizes.

    Args:
        architecture: of the whole model, for messages.

    Raises:
        ConfigError: it is an encoder that we have not.
    """
    found = vision.get("model_type", "clip_vision_model")
    if found not in _ENCODERS:
        raise ConfigError(
            f"{architecture} with vision_config.model_type = {found!r} is not supported; {' and '.join(_ENCODERS)} are"
        )
    name, defaults = _ENCODERS[found]
    return name, sizes_from_hf(vision, defaults, architecture)


def sizes_from_hf(vision: Mapping[str, Any], defaults: Mapping[str, Any], architecture: str) -> Table:
    """The table ``architecture`` of an encoder.

    Args:
        defaults: of keys that ``vision_config`` leaves out; they name all that there are.
        architecture: of the whole model, for messages.

    Raises:
        ConfigError: it has dropout, pictures of other than three channels, or sizes of tiles that are no numbers.
    """
    for key in _NOT_OF_FEATURES:
        vision.get(key)
    for key, supported in (("num_channels", 3), ("attention_dropout", 0.0)):
        if vision.get(key, supported) != supported:
            raise ConfigError(
                f"{architecture} with vision_config.{key} = {vision[key]!r} is not supported; only {supported!r} is"
            )
    sizes = {key: vision.get(key, default) for key, default in defaults.items()}
    check_counts(architecture, "vision_config.", {key: sizes[key] for key in ("image_size", "patch_size")})
    return sizes


def check_counts(architecture: str, within: str, values: Mapping[str, Any]) -> None:
    """
    Args:
        within: the table that they are in, with a point at its end.

    Raises:
        ConfigError: a value is no whole number from 1.
    """
    for key, value in values.items():
        if type(value) is not int or value < 1:
            sentence = f"{architecture} with {within}{key} = {value!r} is not supported"
            raise ConfigError(f"{sentence}; whole numbers from 1 are")


def tower_to_hf(config: FixedSizeConfig, model_type: str, n_layers: int) -> Table:
    """The ``vision_config`` of an encoder.

    Args:
        n_layers: how many are written.
    """
    return {
        **attrs.asdict(config.found),
        "model_type": model_type,
        "num_hidden_layers": n_layers,
        "num_channels": 3,
        "attention_dropout": 0.0,
    }


def checked_encoder(
    config: VisionLanguageConfig, architecture: str, *classes: type[FixedSizeConfig]
) -> FixedSizeConfig:
    """The encoder's config.

    Args:
        classes: that the architecture has.

    Raises:
        ConfigError: it is another one, or takes tiles of a size that its positions are interpolated for.
    """
    encoder = config.encoder.config
    if not isinstance(encoder, classes):
        known = " or ".join(one.__name__.removesuffix("Config").lower() for one in classes)
        raise ConfigError(f"{architecture} has an encoder {known}, and model.encoder is {config.encoder.name}")
    if encoder.tile_size != encoder.native_size:
        native, size = encoder.native_size[0], [*encoder.tile_size]
        raise ConfigError(
            f"{architecture} takes tiles of {native} × {native} pixels alone; model.encoder.size is {size}"
        )
    return encoder


def tower_names(config: FixedSizeConfig) -> dict[str, str]:
    """Our names of the encoder's parameters, and theirs, both without what comes before."""
    names = {f"embeddings.{one}": f"embeddings.{one}" for one in _embeddings(config)}
    pairs = [("pre_norm", "pre_layrnorm")] if isinstance(config, ClipConfig) else []
    if isinstance(config, SiglipConfig) and config.feature_layer == -1:
        pairs.append(("norm", "post_layernorm"))
    pairs += [
        (f"layers.{number}.{one}", f"encoder.layers.{number}.{one}")
        for number in range(config.depth)
        for one in (*_NORMS, *_MATRICES)
    ]
    return names | {f"{ours}.{key}": f"{theirs}.{key}" for ours, theirs in pairs for key in ("weight", "bias")}


def _embeddings(config: FixedSizeConfig) -> tuple[str, ...]:
    own = "class_embedding" if isinstance(config, ClipConfig) else "patch_embedding.bias"
    return own, "patch_embedding.weight", "position_embedding.weight"
