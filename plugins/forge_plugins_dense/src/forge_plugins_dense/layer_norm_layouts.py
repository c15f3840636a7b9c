"""The weight layouts of StarCoder2 and StableLM, Llama with LayerNorm, for forge-plugins-hf."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.decoder_layout import DecoderLayout, Table
from forge_plugins_dense.weight_layouts import RelativeLayout


class LayerNormLayout(RelativeLayout):
    """A subclass says what they call the number that is added to variances."""

    epsilon: ClassVar[str]

    def read(self, hf: Mapping[str, Any]) -> Table:
        named = ChainMap({"rms_norm_eps": hf[self.epsilon]}, cast("Table", hf))
        return super().read(named) | {"norm": "layernorm"}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        table = super().write(config, vocab_size)
        return table | {self.epsilon: table.pop("rms_norm_eps")}


class Starcoder2Layout(LayerNormLayout):
    """StarCoder2: a feed-forward layer of two matrices, biases everywhere, a sliding window."""

    architectures = ("Starcoder2ForCausalLM",)
    model_type = "starcoder2"
    epsilon = "norm_epsilon"
    inside: ClassVar[Mapping[str, str]] = {
        **DecoderLayout.inside,
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    dropouts: ClassVar[Mapping[str, str]] = {
        **LayerNormLayout.dropouts,
        "residual_dropout": "residual_dropout",
        "embedding_dropout": "embedding_dropout",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
        "use_bias": True,
        "tie_word_embeddings": True,
        "initializer_range": 0.018042,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        biases = dict.fromkeys(("attention_bias", "mlp_bias"), hf["use_bias"])
        table = super().read(ChainMap(biases, cast("Table", hf)))
        return table | {
            "feed_forward": table["feed_forward"] | {"gated": False},
            "window": hf["sliding_window"] or 0,
        }

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        table = super().write(config, vocab_size)
        return table | {"use_bias": table.pop("attention_bias"), "sliding_window": config.window or None}


class StableLmLayout(LayerNormLayout):
    """StableLM 3B and StableLM 2 1.6B: a part of each head's features is rotated."""

    architectures = ("StableLmForCausalLM",)
    model_type = "stablelm"
    may_be_biased = False
    epsilon = "layer_norm_eps"
    partial_rotary = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "hidden_dropout": 0.0,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        for key in ("qk_layernorm", "use_parallel_residual", "hidden_dropout"):
            if hf[key]:
                raise ConfigError(
                    f"StableLmForCausalLM with {key} = {hf[key]!r} is not supported; {self.defaults[key]!r} is"
                )
        return super().read(hf) | {"attention_bias": "qkv" if hf["use_qkv_bias"] else "none"}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        table = super().write(config, vocab_size)
        del table["head_dim"]  # transformers goes by hidden_size and num_attention_heads
        return table | {"use_qkv_bias": config.attention_bias == "qkv"}
