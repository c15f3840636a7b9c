"""The weight layouts of Gemma 2 and 3, for forge-plugins-hf."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, ClassVar

from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.decoder_layout import DecoderLayout, Table
from forge_plugins_dense.huggingface import activation_to_hf, mlp_from_hf, rope_from_hf
from forge_plugins_dense.huggingface_layers import tables_of_layers, tables_of_windows, windows_from_hf, windows_to_hf
from forge_plugins_dense.weight_layouts import RelativeLayout


class GemmaLayout(RelativeLayout):
    """What both have: zero-centred norms at inputs and outputs, GeGLU, embeddings times √dim."""

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
        return super().read(ChainMap({"hidden_act": "silu"}, hf)) | self._beyond_llama(hf)

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
        return super().write(config, vocab_size) | {
            **windows_to_hf(config),
            "hidden_activation": activation,
            "hidden_act": activation,
            "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar,
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
    frequencies of its own."""

    architectures = ("Gemma3ForCausalLM",)
    model_type = "gemma3_text"
    defaults: ClassVar[Mapping[str, Any]] = {
        **GemmaLayout.defaults,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": None,
        "_sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }

    def _beyond_llama(self, hf: Mapping[str, Any]) -> Table:
        old, new = hf["sliding_window_pattern"], hf["_sliding_window_pattern"]
        pattern = old or new
        windows = windows_from_hf(hf, lambda number: (number + 1) % pattern != 0)
        rope = hf.get("rope_parameters") or {}
        if "full_attention" not in rope:  # as transformers 4 writes it
            everywhere = rope_from_hf(hf, self.architectures[0])
            local: Table = {"rope_theta": hf["rope_local_base_freq"], "rope_factor": 1.0}
        else:
            _ = hf.get("rope_scaling"), hf["rope_theta"], hf["rope_local_base_freq"]  # the same once more
            everywhere, local = (
                rope_from_hf(ChainMap({"rope_parameters": rope[kind]}, hf), self.architectures[0])
                for kind in ("full_attention", "sliding_attention")
            )
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

    def read(self, hf: Mapping[str, Any]) -> Table:
        # the keys of rotary positions are read for each kind of layer
        apart: Table = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0, "hidden_act": "silu"}
        return RelativeLayout.read(self, ChainMap(apart, hf)) | self._beyond_llama(hf)

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
