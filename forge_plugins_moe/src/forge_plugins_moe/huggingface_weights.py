"""Weights of sparse decoders of Hugging Face under our names, and back.

Files have each expert's matrices by themselves; models of transformers 5 have those of a layer in stacks, gate and up
in one. Both are read, and either is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch

from forge_core.errors import ConfigError
from forge_plugins_dense import huggingface as dense
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_moe.huggingface import DEEPSEEK_V3, Architecture, architecture_of
from forge_plugins_moe.sparse_config import moe_of, sparse_layers


def from_hf_state(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Hugging Face weights under our names, of a file or of a model. Experts are copied into stacks; what a run
    keeps of the last step begins as in a new one; DeepSeek's multi-token prediction is left out.

    Raises:
        ConfigError: weights are missing or left over, or in float8; or no architecture of Hugging Face is equal to this
            model.
    """
    architecture = architecture_of(config)
    packed = any(name.endswith(".experts.gate_up_proj") for name in state)
    names = _names(config, architecture, packed=packed)
    layers = list(_layers(config, architecture, packed=packed))
    spare = {name for name in state if dense.is_derived(name) or name.startswith(_predictors(config, architecture))}
    if any(name.endswith("weight_scale_inv") for name in state):
        raise ConfigError(
            "these weights are in float8 with scales; convert them to bf16 first, as their authors describe"
        )
    if config.tie_embeddings:
        spare.add("lm_head.weight")
    dense.check_complete(state.keys() - spare, {*names.values(), *(name for layer in layers for name in layer.names())})

    ours = {our_name: state[name] for our_name, name in names.items()}
    for layer in layers:
        ours |= layer.read(state)
    for name, first in _kept(config).items():
        ours[name] = torch.full((moe_of(config).n_experts,), first)
    return _turned(ours, config, to_pairs=False)


def to_hf_state(
    state: Mapping[str, torch.Tensor], config: TransformerConfig, *, packed: bool = False
) -> dict[str, torch.Tensor]:
    """Our weights under Hugging Face's names. A tied head is left out, as they do, and so are what a run keeps of
    the last step and what predicts further tokens.

    Args:
        packed: as models of transformers 5 have them, and not as files do, which all versions read.

    Raises:
        ConfigError: as ``from_hf_state``.
    """
    architecture = architecture_of(config)
    names = _names(config, architecture, packed=packed)
    layers = list(_layers(config, architecture, packed=packed))
    spare = {name for name in state if name.startswith(_predictors(config, architecture))}
    spare |= {*_kept(config), *(["head.weight"] if config.tie_embeddings else [])}
    stacks = {f"{layer.ours}.{matrix}" for layer in layers for matrix in ("gate", "up", "down")}
    dense.check_complete(state.keys() - spare, names.keys() | stacks)

    turned = _turned({our_name: state[our_name] for our_name in names}, config, to_pairs=True)
    theirs = {name: turned[our_name] for our_name, name in names.items()}
    for layer in layers:
        theirs |= layer.write(state)
    return theirs


def _names(config: TransformerConfig, architecture: Architecture, *, packed: bool) -> dict[str, str]:
    """Our name to theirs, of all that is not an expert's."""
    names = dense.decoder_names(config)
    for layer in sparse_layers(config):
        ours, theirs = f"blocks.{layer}.feed_forward", _prefix(layer, architecture, packed=packed)
        for matrix in ("gate", "up", "down"):
            del names[f"{ours}.{matrix}.weight"]
        names[f"{ours}.router.gate.weight"] = f"{theirs}.gate.weight"
        if architecture is DEEPSEEK_V3:
            names[f"{ours}.router.bias"] = f"{theirs}.gate.e_score_correction_bias"
            for matrix, theirs_is in architecture.matrices.items():
                names[f"{ours}.shared.{matrix}.weight"] = f"{theirs}.shared_experts.{theirs_is}.weight"
    return names


def _predictors(config: TransformerConfig, architecture: Architecture) -> tuple[str, ...]:
    """Prefixes of what predicts further tokens, which generation does without: ours, and those of DeepSeek's files."""
    layers = range(config.n_layers, config.n_layers + config.n_predictors)
    theirs = (f"model.layers.{config.n_layers}.",) if architecture is DEEPSEEK_V3 else ()
    return (*(f"blocks.{layer}." for layer in layers), *theirs)


def _turned(state: dict[str, torch.Tensor], config: TransformerConfig, *, to_pairs: bool) -> dict[str, torch.Tensor]:
    """With the rotated features of latent attention in the other order: we rotate feature ``i`` together with
    ``i + half``, DeepSeek ``2 i`` with ``2 i + 1``. Queries and keys are turned alike, so their products are the same.

    Args:
        state: under our names.
        to_pairs: into their order.
    """
    latent = config.latent_attention
    if latent is None:
        return state
    order = torch.arange(latent.rotary_dim).view(2, -1).T if to_pairs else torch.arange(latent.rotary_dim).view(-1, 2).T
    for layer in range(config.n_layers):
        q, k = f"blocks.{layer}.attention.q.weight", f"blocks.{layer}.attention.kv_down.weight"
        heads = state[q].unflatten(0, (config.n_heads, -1))
        plain, rotary = heads.split((latent.plain_dim, latent.rotary_dim), dim=1)
        state[q] = torch.cat([plain, rotary[:, order.flatten()]], dim=1).flatten(0, 1)
        values, rotary = state[k].split((latent.kv_rank, latent.rotary_dim))
        state[k] = torch.cat([values, rotary[order.flatten()]])
    return state


def _layers(config: TransformerConfig, architecture: Architecture, *, packed: bool) -> Iterator[_OneByOne | _Packed]:
    n_experts = moe_of(config).n_experts
    for layer in sparse_layers(config):
        ours = f"blocks.{layer}.feed_forward.experts"
        theirs = f"{_prefix(layer, architecture, packed=packed)}.experts"
        if packed:
            yield _Packed(ours, theirs)
        else:
            yield _OneByOne(ours, theirs, architecture.matrices, n_experts)


@attrs.frozen
class _OneByOne:
    """The experts of a layer, as files have them."""

    ours: str
    """The prefix of our stacks."""
    theirs: str
    matrices: Mapping[str, str]
    n_experts: int

    def names(self) -> list[str]:
        """Theirs."""
        return [self._name(expert, matrix) for matrix in self.matrices for expert in range(self.n_experts)]

    def read(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Our stacks of their tensors."""
        return {
            f"{self.ours}.{matrix}": torch.stack(
                [state[self._name(expert, matrix)] for expert in range(self.n_experts)]
            )
            for matrix in self.matrices
        }

    def write(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Their tensors of our stacks."""
        return {
            self._name(expert, matrix): state[f"{self.ours}.{matrix}"][expert].clone()  # a file has no parts of others
            for matrix in self.matrices
            for expert in range(self.n_experts)
        }

    def _name(self, expert: int, matrix: str) -> str:
        return f"{self.theirs}.{expert}.{self.matrices[matrix]}.weight"


@attrs.frozen
class _Packed:
    """The same, as models of transformers 5 have them."""

    ours: str
    theirs: str

    def names(self) -> list[str]:
        return [f"{self.theirs}.gate_up_proj", f"{self.theirs}.down_proj"]

    def read(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gate, up = state[f"{self.theirs}.gate_up_proj"].chunk(2, dim=1)
        stacks = {"gate": gate.contiguous(), "up": up.contiguous(), "down": state[f"{self.theirs}.down_proj"]}
        return {f"{self.ours}.{matrix}": stack for matrix, stack in stacks.items()}

    def write(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gate, up, down = (state[f"{self.ours}.{matrix}"] for matrix in ("gate", "up", "down"))
        return {f"{self.theirs}.gate_up_proj": torch.cat([gate, up], dim=1), f"{self.theirs}.down_proj": down}


def _prefix(layer: int, architecture: Architecture, *, packed: bool) -> str:
    return f"model.layers.{layer}.{'mlp' if packed else architecture.layer}"


def _kept(config: TransformerConfig) -> dict[str, float]:
    """What a run keeps of the last step, for each expert, and Hugging Face's models do not; with its first value."""
    moe = moe_of(config)
    kept = {}
    if moe.router.config.balance > 0 and moe.router.config.balance_scope == "global_batch":
        kept["router.load_share"] = 1 / moe.n_experts
    if moe.scale_gradients:
        kept["experts.gradient_scale"] = 1.0
    return {
        f"blocks.{layer}.feed_forward.{name}": first for layer in sparse_layers(config) for name, first in kept.items()
    }
