"""The weight layouts of Gemma 1, 2 and 3, for forge-plugins-hf."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.decoder_layout import DecoderLayout, Table
from forge_plugins_dense.huggingface import activation_to_hf, mlp_from_hf, rope_from_hf
from forge_plugins_dense.huggingface_layers import (
    named_windows_to_hf,
    tables_of_layers,
    tables_of_windows,
    windows_from_hf,
)
from forge_plugins_dense.weight_layouts import RelativeLayout
from forge_plugins_hf.config_json import part_of

_OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index"),
    "initializer_range",
)
"""Keys beside ``text_config`` that say nothing of text."""


class Gemma1Layout(RelativeLayout):
    """Gemma 1: zero-centred norms at inputs, GeGLU, embeddings times √dim."""

    architectures = ("GemmaForCausalLM",)
    model_type = "gemma"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_activation": None,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        new, old = hf["hidden_activation"], hf["hidden_act"]
        activation = new or ("gelu_pytorch_tanh" if old == "gelu" else old)  # early files say one and mean the other
        return super().read(ChainMap({"hidden_act": activation}, cast("Table", hf))) | {
            "norm": "zero_centered_rmsnorm",
            "embed_multiplier": math.sqrt(hf["hidden_size"]),
        }


class GemmaLayout(RelativeLayout):
    """What Gemma 2 and 3 have: zero-centred norms at inputs and outputs, GeGLU, embeddings times √dim."""

    inside: ClassVar[Mapping[str, str]] = {
        **DecoderLayout.inside,
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": None,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        return super().read(ChainMap({"hidden_act": "silu"}, cast("Table", hf))) | self._beyond_llama(hf)

    def _beyond_llama(self, hf: Mapping[str, Any]) -> Table:
        hf["hidden_act"]  # of early files, which ``hidden_activation`` stands above
        return {
            "norm": "zero_centered_rmsnorm",
            "norm_placement": "both",
            "feed_forward": mlp_from_hf(hf, self.architectures[0], "hidden_activation"),
            "embed_multiplier": math.sqrt(hf["hidden_size"]),
            "attention_multiplier": math.sqrt(hf["head_dim"] / hf["query_pre_attn_scalar"]),
            "attention_softcap": hf["attn_logit_softcapping"],
            "output_softcap": hf["final_logit_softcapping"],
        }

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        activation = activation_to_hf(config.feed_forward.config)
        scalar = config.head_size / config.attention_multiplier**2
        if not math.isclose(scalar, round(scalar)):
            raise ConfigError(
                f"query_pre_attn_scalar of {self.architectures[0]} is a whole number, and attention_multiplier makes "
                f"it {scalar:g}"
            )
        plain = attrs.evolve(config, attention_multiplier=1.0)  # which would be in the factor of yarn, too
        return super().write(plain, vocab_size) | {
            **named_windows_to_hf(config),
            "hidden_activation": activation,
            "hidden_act": activation,
            "query_pre_attn_scalar": round(scalar),
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.output_softcap,
        }


class Gemma2Layout(GemmaLayout):
    """Gemma 2: capped logits, and a sliding window in every second layer."""

    architectures = ("Gemma2ForCausalLM",)
    model_type = "gemma2"
    defaults: ClassVar[Mapping[str, Any]] = {
        **GemmaLayout.defaults,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    def _beyond_llama(self, hf: Mapping[str, Any]) -> Table:
        windows = windows_from_hf(hf, lambda number: number % 2 == 0)
        return super()._beyond_llama(hf) | tables_of_windows(windows)


class Gemma3Layout(GemmaLayout):
    """Gemma 3 for text: norms of queries and keys, five layers with a sliding window to one without, which has rotary
    frequencies of its own. A model for text and images is read without its vision part, and written as one for text."""

    architectures = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    model_type = "gemma3_text"
    further_prefixes = ("language_model.model.", "model.language_model.")  # in files, and in memory
    further_heads = ("language_model.lm_head",)
    foreign = (
        *("vision_tower.*", "multi_modal_projector.*"),
        *("model.vision_tower.*", "model.multi_modal_projector.*"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        **GemmaLayout.defaults,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": None,
        "_sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }

    def model_table(self, config_json: Mapping[str, Any]) -> Table:
        if config_json.get("architectures") != ["Gemma3ForConditionalGeneration"]:
            return super().model_table(config_json)
        for key in _OF_IMAGES:
            config_json.get(key)
        text = part_of(config_json, "text_config")
        text.get("tie_word_embeddings")  # transformers goes by the key beside text_config
        tied = config_json.get("tie_word_embeddings", True)
        return super().model_table(ChainMap({"tie_word_embeddings": tied}, cast("Table", text)))

    def _beyond_llama(self, hf: Mapping[str, Any]) -> Table:
        if hf["attn_logit_softcapping"]:
            raise ConfigError(
                f"{self.architectures[0]} with attn_logit_softcapping = {hf['attn_logit_softcapping']} is not "
                "supported, as its attention in transformers caps nothing; only null is"
            )
        old, new = hf["sliding_window_pattern"], hf["_sliding_window_pattern"]
        pattern = old or new
        windows = windows_from_hf(hf, lambda number: (number + 1) % pattern != 0)
        rope = hf.get("rope_parameters") or {}
        if not rope.keys() & {"full_attention", "sliding_attention"}:  # as transformers 4 writes it
            everywhere = self._rope(hf)
            local: Table = {"rope_theta": hf["rope_local_base_freq"], "rope_factor": 1.0}
        else:
            full: Table = {"rope_theta": hf["rope_theta"]} | (rope.get("full_attention") or {})
            near: Table = {"rope_theta": hf["rope_local_base_freq"]} | (rope.get("sliding_attention") or {})
            everywhere = self._rope(ChainMap({"rope_parameters": full}, cast("Table", hf)))
            local = self._rope({"rope_parameters": near})
        each = [
            {
                "window": window,
                "rope_theta": float((local if window else everywhere)["rope_theta"]),
                "rope_factor": (local if window else everywhere).get("rope_factor", 1.0),
            }
            for window in windows
        ]
        usual, layers = tables_of_layers(each)
        return super()._beyond_llama(hf) | {"qk_norm": True, **usual, "layers": layers}

    def _rope(self, hf: Mapping[str, Any]) -> Table:
        table = rope_from_hf(hf, self.architectures[0])
        if others := table.keys() - {"rope_theta", "rope_factor"}:
            raise ConfigError(
                f"{self.architectures[0]} with {min(others)} is not supported; rope_type of default and linear are"
            )
        return table

    def read(self, hf: Mapping[str, Any]) -> Table:
        # the keys of rotary positions are read for each kind of layer
        apart: Table = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0, "hidden_act": "silu"}
        return RelativeLayout.read(self, ChainMap(apart, cast("Table", hf))) | self._beyond_llama(hf)

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        layers = [config.layer(number) for number in range(config.n_layers)]
        kinds: dict[str, Table] = {}
        for kind in ("full_attention", "sliding_attention"):
            one = next((layer for layer in layers if bool(layer.window) == (kind == "sliding_attention")), layers[0])
            kinds[kind] = {"rope_type": "default", "rope_theta": one.rope_theta}
            if one.rope_factor != 1:
                kinds[kind] |= {"rope_type": "linear", "factor": one.rope_factor}
        full, local = kinds["full_attention"], kinds["sliding_attention"]
        scaling = {key: value for key, value in full.items() if key != "rope_theta"}
        return super().write(config, vocab_size) | {
            "rope_parameters": kinds,
            "rope_theta": full["rope_theta"],
            "rope_local_base_freq": local["rope_theta"],
            "rope_scaling": scaling if scaling["rope_type"] != "default" else None,
        }
