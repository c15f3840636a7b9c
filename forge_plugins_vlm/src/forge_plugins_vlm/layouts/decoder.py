"""The decoder of a vision-language model of Hugging Face, which is laid out as one for text alone."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

import attrs

from forge_core.errors import ConfigError, nearest
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.weight_layouts import LlamaLayout, MistralLayout, Qwen2Layout
from forge_plugins_hf.weight_layout import WeightLayout
from forge_plugins_vlm.config import VisionLanguageConfig

Table = dict[str, Any]


class _Family(NamedTuple):
    layout: WeightLayout
    architecture: str
    defaults: Mapping[str, Any]
    """Of the keys that ``text_config`` leaves out, as many published files do."""


_SEVEN_BILLION = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
FAMILIES = {
    "llama": _Family(
        LlamaLayout(None),
        "LlamaForCausalLM",
        _SEVEN_BILLION | {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    ),
    "mistral": _Family(
        MistralLayout(None),
        "MistralForCausalLM",
        _SEVEN_BILLION | {"vocab_size": 32_000, "intermediate_size": 14_336, "max_position_embeddings": 131_072},
    ),
    "qwen2": _Family(
        Qwen2Layout(None),
        "Qwen2ForCausalLM",
        _SEVEN_BILLION | {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
    ),
}
"""By ``model_type``."""
_LEFT_OVER = (
    *("_flash_attn_2_enabled", "is_llama_config", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor"),
    "transformers.js_config",
)
"""Keys in ``text_config`` of SmolVLM that nothing reads."""


def decoder_from_hf(text: Mapping[str, Any], architecture: str) -> Table:
    """The keys of ``[model]`` for a ``text_config``.

    Args:
        architecture: of the whole model, for messages.

    Raises:
        ConfigError: it is of a family that we have not, or uses something that the decoder has not.
    """
    found = text.get("model_type", "llama")
    if found not in FAMILIES:
        near = nearest(str(found), FAMILIES)
        hint = f" Did you mean {near}?" if near else ""
        sentence = f"{architecture} with text_config.model_type = {found!r} is not supported"
        raise ConfigError(f"{sentence}; {', '.join(FAMILIES)} are.{hint}")
    for key in _LEFT_OVER:
        text.get(key)
    family = FAMILIES[found]
    whole = ChainMap({"architectures": [family.architecture]}, cast("Table", text), dict(family.defaults))
    return family.layout.model_table(whole)


def decoder_to_hf(config: VisionLanguageConfig, vocab_size: int, families: Collection[str]) -> Table:
    """The ``text_config`` of the first family that is equal to the decoder.

    Args:
        families: that the architecture may have.

    Raises:
        ConfigError: none is; the message says why of each.
    """
    return _equal_to(config, vocab_size, families)[1]


def decoder_names(config: VisionLanguageConfig, families: Collection[str]) -> dict[str, str]:
    """Our names of the decoder's parameters, and theirs in a model for text alone.

    Raises:
        ConfigError: as ``decoder_to_hf``.
    """
    layout, _ = _equal_to(config, 1, families)
    return {recipe.reads[0]: theirs for theirs, recipe in layout.to_huggingface(_decoder(config)).items()}


def _equal_to(config: VisionLanguageConfig, vocab_size: int, families: Collection[str]) -> tuple[WeightLayout, Table]:
    reasons = []
    for family in (FAMILIES[name] for name in families):
        try:
            return family.layout, family.layout.config_json(_decoder(config), vocab_size)
        except ConfigError as error:
            reasons.append(f"{family.architecture}: {error}")
    raise ConfigError("its decoder is none of these: " + "; ".join(reasons))


def _decoder(config: VisionLanguageConfig) -> TransformerConfig:
    keys = {str(one.alias): getattr(config, one.name) for one in attrs.fields(TransformerConfig)}
    return TransformerConfig(**keys)
