"""The weight layout of gpt-oss, for forge-plugins-hf."""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense.activation_config import CLAMPED_SWIGLU
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.decoder_layout import Table
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.huggingface import check_complete, refuse_further_parts
from forge_plugins_dense.huggingface_layers import named_windows_to_hf, tables_of_windows, windows_from_hf
from forge_plugins_dense.weight_layouts import RelativeLayout
from forge_plugins_hf.weight_layout import ReadPart, Recipe
from forge_plugins_moe.config import MoEConfig
from forge_plugins_moe.huggingface import (
    all_sparse_problems,
    is_normalized,
    read_softmax_router,
    softmax_router,
    write_softmax_router,
)
from forge_plugins_moe.router_config import SoftmaxTopKConfig
from forge_plugins_moe.sparse_config import expert_width, moe_of

if TYPE_CHECKING:
    import torch

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssLayout(RelativeLayout):
    """gpt-oss: sinks, every second layer with a window, and experts with biases, whose ``gate`` and ``up`` alternate in
    one stack. MXFP4 is unpacked on the way in; what is written is in the dtype that is asked for."""

    architectures = ("GptOssForCausalLM",)
    model_type = "gpt_oss"
    unpacks = ("mxfp4",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.001,
    }

    def read(self, hf: Mapping[str, Any]) -> Table:
        for key in ("experts_per_token", "initial_context_length"):
            hf.get(key)  # the same once more, as OpenAI calls it
        if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
            hf = ChainMap({"rope_parameters": _YARN}, cast("dict[str, Any]", hf))
        if hf.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"GptOssForCausalLM with hidden_act = {hf['hidden_act']!r} is not supported; only silu is"
            )
        windows = windows_from_hf(hf, lambda number: number % 2 == 0)
        return super().read(hf) | {"attention_sinks": True, **tables_of_windows(windows)}

    def model_table(self, config_json: Mapping[str, Any]) -> Table:
        table = self.decoder_table(config_json)
        hf = {**self.defaults, **{key: config_json[key] for key in config_json if key in _OF_EXPERTS}}
        table["feed_forward"] = {
            "name": "moe",
            "n_experts": hf["num_local_experts"],
            "hidden_dim": hf["intermediate_size"],
            "activation": "clamped_swiglu",
            "activation_limit": float(hf["swiglu_limit"]),
            "activation_slope": float(hf["swiglu_alpha"]),
            "bias": True,
        }
        read_softmax_router(hf, table)
        table["feed_forward"]["router"]["gate_bias"] = True
        return table

    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        return super().write(config, vocab_size) | named_windows_to_hf(config)

    def config_json(self, config: TransformerConfig, vocab_size: int) -> Table:
        refuse_further_parts(config)
        moe = config.feed_forward.config
        if not isinstance(moe, MoEConfig) or not isinstance(moe.router.config, SoftmaxTopKConfig):
            raise ConfigError("GptOssForCausalLM has sparse layers with the router softmax_topk")
        if problems := list(_problems(config)):
            raise ConfigError(f"this model has no Hugging Face form like GptOssForCausalLM: {'; '.join(problems)}")
        dense = attrs.evolve(config.feed_forward, name="mlp", config=MLPConfig(hidden_dim=expert_width(config)))
        table = super().config_json(attrs.evolve(config, feed_forward=dense), vocab_size)
        table |= {
            "num_local_experts": moe.n_experts,
            "num_experts_per_tok": softmax_router(config).top_k,
            "swiglu_limit": moe.activation_limit,
            "swiglu_alpha": moe.activation_slope,
        }
        write_softmax_router(config, table)
        return table

    def to_forge(self, config: TransformerConfig, names: Collection[str]) -> Mapping[str, Recipe]:
        import torch  # forge validate does without

        from forge_plugins_moe.huggingface_weights import kept_of_last_step

        packed = any(name.endswith("_blocks") for name in names)
        more = dict(_read_layers(config, packed=packed))
        of_layers = {name for name in names if ".mlp." in name or name.endswith(".sinks")}
        check_complete(of_layers, {name for recipe in more.values() for name in recipe.reads})
        kept = {
            name: Recipe((), functools.partial(torch.full, (moe_of(config).n_experts,), first))
            for name, first in kept_of_last_step(config).items()
        }
        return {**super().to_forge(config, set(names) - of_layers), **more, **kept}

    def to_huggingface(self, config: TransformerConfig) -> Mapping[str, Recipe]:
        return {**super().to_huggingface(config), **dict(_write_layers(config))}


_OF_EXPERTS = (
    *("num_local_experts", "num_experts_per_tok", "intermediate_size", "num_hidden_layers"),
    *("swiglu_limit", "swiglu_alpha", "router_aux_loss_coef"),
)


def _problems(config: TransformerConfig) -> Iterator[str]:
    moe, router = moe_of(config), softmax_router(config)
    yield from all_sparse_problems(config)
    if moe.activation != CLAMPED_SWIGLU:
        yield "activation must be clamped_swiglu"
    if not moe.bias:
        yield "experts must have a bias"
    if not router.gate_bias:
        yield "the router must have a gate_bias"
    if not is_normalized(router):
        yield "the weights of a token must sum to 1"
    if moe.capacity_factor is not None:
        yield "there must be no capacity_factor"


def _places(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Our prefix of each layer, and theirs."""
    for layer in range(config.n_layers):
        yield f"blocks.{layer}", f"model.layers.{layer}"


_RENAMED = {
    "attention.sinks.bias": "self_attn.sinks",
    "feed_forward.router.gate.weight": "mlp.router.weight",
    "feed_forward.router.gate.bias": "mlp.router.bias",
    "feed_forward.experts.down_bias": "mlp.experts.down_proj_bias",
}


def _read_layers(config: TransformerConfig, *, packed: bool) -> Iterator[tuple[str, Recipe]]:
    """
    Args:
        packed: whether experts are in MXFP4.
    """
    for ours, theirs in _places(config):
        for mine, one in _RENAMED.items():
            yield f"{ours}.{mine}", Recipe((f"{theirs}.{one}",))
        stacks = {"down": ("down_proj", slice(None)), "gate": ("gate_up_proj", slice(0, None, 2))}
        stacks["up"] = ("gate_up_proj", slice(1, None, 2))
        for matrix, (one, rows) in stacks.items():
            name = f"{theirs}.mlp.experts.{one}"
            reads = (f"{name}_blocks", f"{name}_scales") if packed else (name,)
            make: Callable[..., torch.Tensor] = _unpacked if packed else _turned
            made = functools.partial(make, rows=rows)
            part = functools.partial(_of_experts, reads=reads, make=made)
            yield f"{ours}.feed_forward.experts.{matrix}", Recipe(reads, made, part)
            if matrix != "down":
                make = functools.partial(_columns, columns=rows)
                yield f"{ours}.feed_forward.experts.{matrix}_bias", Recipe((f"{name}_bias",), make)


def _write_layers(config: TransformerConfig) -> Iterator[tuple[str, Recipe]]:
    for ours, theirs in _places(config):
        for mine, one in _RENAMED.items():
            yield f"{theirs}.{one}", Recipe((f"{ours}.{mine}",))
        experts, name = f"{ours}.feed_forward.experts", f"{theirs}.mlp.experts"
        both = (f"{experts}.gate", f"{experts}.up")
        yield f"{name}.down_proj", Recipe((f"{experts}.down",), functools.partial(_turned, rows=slice(None)))
        yield f"{name}.gate_up_proj", Recipe(both, lambda gate, up: _alternating(gate, up).mT.contiguous())
        yield f"{name}.gate_up_proj_bias", Recipe((f"{both[0]}_bias", f"{both[1]}_bias"), _alternating)


def _of_experts(
    read: ReadPart, part: Sequence[slice], *, reads: Sequence[str], make: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """A part of a stack, of which all of a rank's experts are read and no others."""
    experts, *others = part
    return make(*(read(name, (experts,)) for name in reads))[(slice(None), *others)]


def _turned(stack: torch.Tensor, *, rows: slice) -> torch.Tensor:
    """``(E, in, out)`` to some of ``(E, out, in)``, or the reverse."""
    return stack.mT[:, rows].contiguous()


def _unpacked(blocks: torch.Tensor, scales: torch.Tensor, *, rows: slice) -> torch.Tensor:
    """``(E, out, in / 32, 16)`` and ``(E, out, in / 32)`` to some of ``(E, out, in)``, and no others meanwhile."""
    from forge_plugins_moe.mxfp4 import unpack

    return unpack(blocks[:, rows], scales[:, rows])


def _columns(bias: torch.Tensor, *, columns: slice) -> torch.Tensor:
    return bias[:, columns].contiguous()


def _alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two ``(E, out, …)`` to ``(E, 2 · out, …)``."""
    import torch

    return torch.stack((gate, up), dim=2).flatten(1, 2)
