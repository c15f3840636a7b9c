"""The weight layouts of Llama and its near relatives, for forge-plugins-hf."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense import huggingface
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.decoder_layout import (
    DecoderLayout,
    Fused,
    Table,
    rows,
)
from forge_plugins_dense.huggingface import (
    activation_to_hf,
    mlp_from_hf,
    rope_from_hf,
    rope_kind,
    rope_table,
    rope_to_hf,
)
from forge_plugins_dense.huggingface_layers import (
    named_windows_to_hf,
    tables_of_windows,
    used_windows_from_hf,
    used_windows_to_hf,
    windows_from_hf,
    with_some_rotated,
)
from forge_plugins_dense.rope_config import LongRope
from forge_plugins_hf.weight_layout import Recipe, WeightLayout


class LlamaLayout(WeightLayout):
    """Weights have other names, and are the same."""

    architectures = ("LlamaForCausalLM", "Qwen3ForCausalLM")
    order = 0

    def __init__(self, config: object, /) -> None: ...

    def model_table(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        return huggingface.config_from_hf(config_json)

    def config_json(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return huggingface.hf_config(config, vocab_size)

    def to_forge(self, config: TransformerConfig, names: Collection[str]) -> Mapping[str, Recipe]:
        ours = huggingface.from_hf_state({name: name for name in names}, config)
        return {name: Recipe((theirs,)) for name, theirs in ours.items()}

    def to_huggingface(self, config: TransformerConfig) -> Mapping[str, Recipe]:
        names = huggingface.weight_names(config)
        return {theirs: Recipe((ours,)) for ours, theirs in names.items()}


class RelativeLayout(DecoderLayout):
    """A decoder with the keys of Llama's configuration, and some more."""

    partial_rotary: ClassVar[bool] = False
    """Whether it may rotate a part of a head's features."""
    may_be_biased: ClassVar[bool] = True
    """Whether ``attention_bias`` says something there."""

    def read(self, hf: Mapping[str, Any]) -> Table:
        name = self.architectures[0]
        table: Table = {
            "name": "transformer",
            "dim": hf["hidden_size"],
            "n_layers": hf["num_hidden_layers"],
            "n_heads": hf["num_attention_heads"],
            "n_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
            "head_dim": hf.get("head_dim") or None,
            "vocab_size": hf["vocab_size"],
            "max_seq_len": hf["max_position_embeddings"],
            "norm_eps": hf.get("rms_norm_eps", 1e-6),
            "tie_embeddings": hf.get("tie_word_embeddings", False),
            "init_std": hf.get("initializer_range", 0.02),
            "attention_bias": "all" if self.may_be_biased and hf.get("attention_bias", False) else "none",
            "feed_forward": mlp_from_hf(hf, name),
        }
        return table | rope_from_hf(hf, name, partial=self.partial_rotary)

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        mlp = config.feed_forward.config
        rope = rope_to_hf(config)
        fraction = {"partial_rotary_factor": config.rotary_fraction} if self.partial_rotary else {}
        bias = {"attention_bias": config.attention_bias == "all"} if self.may_be_biased else {}
        return {
            "hidden_size": config.dim,
            "intermediate_size": mlp.width(config.dim),
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "max_position_embeddings": config.max_seq_len,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": rope if rope["rope_type"] != "default" else None,
            "rope_parameters": rope | {"rope_theta": config.rope_theta} | fraction,
            "tie_word_embeddings": config.tie_embeddings,
            "initializer_range": config.init_std,
            "hidden_act": activation_to_hf(mlp),
            **bias,
            **fraction,
        }


class MistralLayout(RelativeLayout):
    """Mistral 7B and its successors: Llama, with a sliding window in early ones."""

    architectures = ("MistralForCausalLM",)
    model_type = "mistral"
    may_be_biased = False
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}

    def read(self, hf: Mapping[str, Any]) -> Table:
        return super().read(hf) | {"window": hf["sliding_window"] or 0}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        return super().write(config, vocab_size) | {"sliding_window": config.window or None}


class MinistralLayout(RelativeLayout):
    """Ministral 8B: a sliding window in most layers."""

    architectures = ("MinistralForCausalLM",)
    model_type = "ministral"
    may_be_biased = False
    order = WeightLayout.order + 1  # with one window, the model is a Mistral
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}

    def read(self, hf: Mapping[str, Any]) -> Table:
        return super().read(hf) | tables_of_windows(windows_from_hf(hf, lambda _: True))

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        return super().write(config, vocab_size) | named_windows_to_hf(config)


class ArceeLayout(RelativeLayout):
    """Arcee's AFM: Llama with a feed-forward layer of two matrices and ReLU²."""

    architectures = ("ArceeForCausalLM",)
    model_type = "arcee"
    defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}

    def read(self, hf: Mapping[str, Any]) -> Table:
        table = super().read(hf)
        return table | {"feed_forward": table["feed_forward"] | {"gated": False}}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        return super().write(config, vocab_size) | {"mlp_bias": config.feed_forward.config.bias}


class SeedOssLayout(RelativeLayout):
    """Seed-OSS: biases of queries, keys and values, and dropout."""

    architectures = ("SeedOssForCausalLM",)
    model_type = "seed_oss"
    dropouts: ClassVar[Mapping[str, str]] = {**RelativeLayout.dropouts, "residual_dropout": "residual_dropout"}
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        biases = bool(hf["attention_bias"]), bool(hf["attention_out_bias"])
        if biases not in _SEED_BIASES:
            raise ConfigError("SeedOssForCausalLM with attention_out_bias alone is not supported")
        return super().read(hf) | {"attention_bias": _SEED_BIASES[biases]}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        inputs, output = next(both for both, name in _SEED_BIASES.items() if name == config.attention_bias)
        return super().write(config, vocab_size) | {
            "attention_bias": inputs,
            "attention_out_bias": output,
            "mlp_bias": config.feed_forward.config.bias,
        }


_SEED_BIASES = {(False, False): "none", (True, False): "qkv", (True, True): "all"}
"""``attention_bias`` and ``attention_out_bias``, and our word for both."""


class Qwen2Layout(RelativeLayout):
    """Qwen 2 and 2.5: biases of queries, keys and values; sliding windows in the layers from ``max_window_layers`` on,
    if asked for."""

    architectures = ("Qwen2ForCausalLM",)
    model_type = "qwen2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "use_sliding_window": False,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        first = hf["max_window_layers"]
        windows = used_windows_from_hf(hf, lambda number: number >= first)
        return super().read(hf) | {"attention_bias": "qkv", **tables_of_windows(windows)}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        return super().write(config, vocab_size) | used_windows_to_hf(config)


class SmolLM3Layout(RelativeLayout):
    """SmolLM 3: every fourth layer has no rotary positions."""

    architectures = ("SmolLM3ForCausalLM",)
    model_type = "smollm3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "max_window_layers": None,
        "tie_word_embeddings": True,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        hf["max_window_layers"]  # left over from Qwen 2: transformers goes by no_rope_layers
        every = hf["no_rope_layer_interval"]
        has_rope = hf["no_rope_layers"] or [(number + 1) % every != 0 for number in range(hf["num_hidden_layers"])]
        windows = used_windows_from_hf(hf, lambda number: not has_rope[number])
        each = [
            {"rotary_fraction": 1.0 if turned else 0.0, "window": window}
            for turned, window in zip(has_rope, windows, strict=True)
        ]
        return with_some_rotated(super().read(hf), each)

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        turned = [int(config.layer(number).rotary_fraction > 0) for number in range(config.n_layers)]
        return super().write(config, vocab_size) | {
            **used_windows_to_hf(config),
            "no_rope_layers": turned,
            "mlp_bias": config.feed_forward.config.bias,
        }


class GraniteLayout(RelativeLayout):
    """Granite 3: Llama with multipliers."""

    architectures = ("GraniteForCausalLM",)
    model_type = "granite"
    defaults: ClassVar[Mapping[str, Any]] = {"attention_multiplier": 1.0}

    def read(self, hf: Mapping[str, Any]) -> Table:
        table = super().read(hf)
        head_dim = table["head_dim"] or table["dim"] // table["n_heads"]
        return table | {
            "embed_multiplier": float(hf.get("embedding_multiplier", 1.0)),
            "residual_multiplier": float(hf.get("residual_multiplier", 1.0)),
            "output_multiplier": 1.0 / hf.get("logits_scaling", 1.0),
            "attention_multiplier": hf["attention_multiplier"] * head_dim**0.5,
        }

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        plain = attrs.evolve(config, attention_multiplier=1.0)  # which would be in the factor of yarn, too
        return super().write(plain, vocab_size) | {
            "embedding_multiplier": config.embed_multiplier,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": 1.0 / config.output_multiplier,
            "attention_multiplier": config.attention_multiplier / config.head_size**0.5,
            "mlp_bias": config.feed_forward.config.bias,
        }


class Phi3Layout(RelativeLayout):
    """Phi 3 and 4: queries, keys and values in one matrix, and gate and up in one."""

    architectures = ("Phi3ForCausalLM",)
    model_type = "phi3"
    may_be_biased = False
    partial_rotary = True
    dropouts: ClassVar[Mapping[str, str]] = {
        **RelativeLayout.dropouts,
        "residual_dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        hf["original_max_position_embeddings"]  # says something beside longrope only
        for key, supported in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
            if hf[key] != supported:
                raise ConfigError(f"Phi3ForCausalLM with {key} = {hf[key]!r} is not supported; only {supported!r} is")
        rope = rope_table(hf)
        if rope_kind(rope) in ("su", "yarn"):  # as early files call it
            named = {"rope_parameters": rope | {"rope_type": "longrope"}, "rope_scaling": None}
            hf = ChainMap(named, cast("dict[str, Any]", hf))
        window = hf["sliding_window"] or 0
        return super().read(hf) | {"window": window if window < hf["max_position_embeddings"] else 0}

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        if config.yarn is not None:  # their word for long_rope
            raise ConfigError("Phi3ForCausalLM has another yarn")
        if config.rope_scaling is not None or config.rope_factor != 1:
            raise ConfigError("Phi3ForCausalLM stretches rotary frequencies as long_rope does, if at all")
        pairs = int(config.dim // config.n_heads * config.rotary_fraction) // 2
        if config.long_rope is not None and len(config.long_rope.short_factor) != pairs:
            raise ConfigError("Phi3ForCausalLM with longrope rotates pairs of dim / n_heads features a head")
        table = super().write(config, vocab_size) | {
            "sliding_window": config.window or None,
            "original_max_position_embeddings": config.max_seq_len,
        }
        if config.long_rope is not None:
            table |= {
                "original_max_position_embeddings": config.long_rope.original_max_seq_len,
                "rope_scaling": _as_published(config, config.long_rope),
            }
        return table

    def fused(self, config: TransformerConfig) -> Mapping[str, Fused]:
        width = config.feed_forward.config.width(config.dim)
        queries, keys = config.n_heads * config.head_size, config.kv_heads * config.head_size
        return {
            "self_attn.qkv_proj": rows(("attention.q", "attention.k", "attention.v"), (queries, keys, keys)),
            "mlp.gate_up_proj": rows(("feed_forward.gate", "feed_forward.up"), (width, width)),
        }


def _as_published(config: TransformerConfig, long_rope: LongRope) -> Table:
    """``rope_scaling`` of Phi. transformers 4 takes these three keys and no other, and derives the attention factor."""
    table: Table = {
        "type": "longrope",
        "short_factor": [*long_rope.short_factor],
        "long_factor": [*long_rope.long_factor],
    }
    found = long_rope.magnitude(config.max_seq_len)
    if found != attrs.evolve(long_rope, attention_factor=None).magnitude(config.max_seq_len):
        table["attention_factor"] = found
    return table
