"""The weight layouts of GPT-2 and GPT-NeoX, for forge-plugins-hf."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from forge_core.errors import ConfigError
from forge_plugins_dense.activation_config import as_activation
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.decoder_layout import DecoderLayout, Fused, Table, rows
from forge_plugins_dense.huggingface import ACTIVATIONS, activation_to_hf, rope_from_hf, rope_table, rope_to_hf

if TYPE_CHECKING:
    import torch


class GPT2Layout(DecoderLayout):
    """GPT-2: learned positions, LayerNorm, biases. Its linear layers are stored transposed, queries, keys and values in
    one."""

    architectures = ("GPT2LMHeadModel",)
    model_type = "gpt2"
    prefix = "transformer."
    layer = "h.{}."
    outside: ClassVar[Mapping[str, str]] = {"embed": "wte", "embed.positions": "wpe", "norm": "ln_f"}
    inside: ClassVar[Mapping[str, str]] = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
    derived = (".attn.bias", ".attn.masked_bias")
    dropouts: ClassVar[Mapping[str, str]] = {
        "attention_dropout": "attn_pdrop",
        "residual_dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(dropouts.values(), 0.1),
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        for key in (*_SUMMARY, "n_ctx", "reorder_and_upcast_attn"):
            hf.get(key)  # of classification, and of how fp16 is computed
        if not hf["scale_attn_weights"]:
            raise ConfigError("GPT2LMHeadModel with scale_attn_weights = false is not supported; only true is")
        width = {"hidden_dim": hf["n_inner"] or 4 * hf["n_embd"]}
        return {
            "name": "transformer",
            "dim": hf["n_embd"],
            "n_layers": hf["n_layer"],
            "n_heads": hf["n_head"],
            "vocab_size": hf["vocab_size"],
            "max_seq_len": hf["n_positions"],
            "norm": "layernorm",
            "norm_eps": hf["layer_norm_epsilon"],
            "attention_bias": "all",
            "learned_positions": True,
            "rotary_fraction": 0.0,
            "tie_embeddings": hf["tie_word_embeddings"],
            "init_std": hf.get("initializer_range", 0.02),
            "feed_forward": _two_matrices(hf, "activation_function") | width,
        }

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        return {
            "n_embd": config.dim,
            "n_layer": config.n_layers,
            "n_head": config.n_heads,
            "n_inner": config.feed_forward.config.width(config.dim),
            "n_positions": config.max_seq_len,
            "activation_function": _activation(config),
            "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "initializer_range": config.init_std,
        }

    def fused(self, config: TransformerConfig) -> Mapping[str, Fused]:
        width, dim = config.feed_forward.config.width(config.dim), config.dim
        return {
            "attn.c_attn": rows(("attention.q", "attention.k", "attention.v"), (dim, dim, dim), transposed=True),
            "attn.c_proj": rows(("attention.o",), (dim,), transposed=True),
            "mlp.c_fc": rows(("feed_forward.up",), (width,), transposed=True),
            "mlp.c_proj": rows(("feed_forward.down",), (dim,), transposed=True),
        }


class GPTNeoXLayout(DecoderLayout):
    """GPT-NeoX and Pythia: attention and feed-forward layer side by side, a quarter of the features rotated, and each
    head's queries, keys and values together."""

    architectures = ("GPTNeoXForCausalLM",)
    model_type = "gpt_neox"
    prefix = "gpt_neox."
    outside: ClassVar[Mapping[str, str]] = {"embed": "embed_in", "norm": "final_layer_norm"}
    inside: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "attention.o": "attention.dense",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    derived = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    head = "embed_out"
    dropouts: ClassVar[Mapping[str, str]] = {
        "attention_dropout": "attention_dropout",
        "residual_dropout": "hidden_dropout",
        "embedding_dropout": "hidden_dropout",
    }
    defaults: ClassVar[Mapping[str, Any]] = {"rotary_pct": 0.25, "rotary_emb_base": 10_000, "layer_norm_eps": 1e-5}

    def read(self, hf: Mapping[str, Any]) -> Table:
        name = self.architectures[0]
        hf.get("classifier_dropout")
        if not hf.get("attention_bias", True):
            raise ConfigError(f"{name} with attention_bias = false is not supported; only true is")
        rope = {"partial_rotary_factor": hf["rotary_pct"], "rope_theta": hf["rotary_emb_base"], **rope_table(hf)}
        return {
            "name": "transformer",
            "dim": hf["hidden_size"],
            "n_layers": hf["num_hidden_layers"],
            "n_heads": hf["num_attention_heads"],
            "vocab_size": hf["vocab_size"],
            "max_seq_len": hf["max_position_embeddings"],
            "norm": "layernorm",
            "norm_eps": hf["layer_norm_eps"],
            "attention_bias": "all",
            "parallel_residual": hf.get("use_parallel_residual", True),
            "tie_embeddings": hf.get("tie_word_embeddings", False),
            "init_std": hf.get("initializer_range", 0.02),
            "feed_forward": _two_matrices(hf, "hidden_act") | {"hidden_dim": hf["intermediate_size"]},
        } | rope_from_hf(ChainMap({"rope_parameters": rope}, cast("Table", hf)), name, partial=True)

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        rope = rope_to_hf(config)
        return {
            "hidden_size": config.dim,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "intermediate_size": config.feed_forward.config.width(config.dim),
            "max_position_embeddings": config.max_seq_len,
            "layer_norm_eps": config.norm_eps,
            "hidden_act": _activation(config),
            "use_parallel_residual": config.parallel_residual,
            "attention_bias": True,
            "rotary_pct": config.rotary_fraction,
            "rotary_emb_base": config.rope_theta,
            "rope_scaling": rope if rope["rope_type"] != "default" else None,
            "rope_parameters": {
                **rope,
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.rotary_fraction,
            },
            "tie_word_embeddings": config.tie_embeddings,
            "initializer_range": config.init_std,
        }

    def fused(self, config: TransformerConfig) -> Mapping[str, Fused]:
        heads = config.n_heads

        def join(*parts: torch.Tensor) -> torch.Tensor:
            import torch  # forge validate does without

            return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)  # type: ignore[no-untyped-call]  # torch's

        def part(whole: torch.Tensor, index: int) -> torch.Tensor:
            return whole.unflatten(0, (heads, 3, -1))[:, index].flatten(0, 1)  # type: ignore[no-any-return, no-untyped-call]  # torch's

        def find(index: int, features: slice) -> list[slice]:
            size, found = config.head_size, []
            for head in range(features.start // size, -(-features.stop // size)):
                first, last = max(features.start, head * size), min(features.stop, (head + 1) * size)
                before = (2 * head + index) * size  # of features of other matrices
                found.append(slice(before + first, before + last))
            return found

        ours = ("attention.q", "attention.k", "attention.v")
        return {"attention.query_key_value": Fused(ours, join, part, find=find)}


_SUMMARY = (
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    "task_specific_params",
)


def _two_matrices(hf: Mapping[str, Any], key: str) -> Table:
    if hf[key] not in ACTIVATIONS:
        raise ConfigError(f"{key} = {hf[key]!r} is not supported; {', '.join(ACTIVATIONS)} are")
    return {"name": "mlp", "activation": ACTIVATIONS[hf[key]], "gated": False, "bias": True}


def _activation(config: TransformerConfig) -> str:
    return (
        "gelu_new"
        if config.feed_forward.config.activation == as_activation("gelu_tanh")
        else activation_to_hf(config.feed_forward.config)
    )
