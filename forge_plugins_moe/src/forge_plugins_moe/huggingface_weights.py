"""Weights of sparse decoders of Hugging Face under our names, and back.

Files have each expert's matrices by themselves; models of transformers 5 have those of a layer in stacks, gate and up
in one. Both are read, and either is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
import torch

from forge_core.errors import ConfigError
from forge_plugins_dense import huggingface as dense
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.latent_config import latent_of
from forge_plugins_moe.huggingface import Architecture, architecture_of
from forge_plugins_moe.sparse_config import moe_of, sparse_layers


@attrs.frozen
class Made:
    """How a tensor is made of those on the other side."""

    reads: tuple[str, ...]
    make: Callable[..., torch.Tensor]
    """Given those, in this order."""


@attrs.frozen(eq=False)
class Rows:
    """Makes a tensor of entries of another along one dimension, in this order."""

    order: torch.Tensor
    dim: int = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(self.dim, self.order.to(tensor.device))

    def part(
        self, read: Callable[[str, Sequence[slice]], torch.Tensor], part: Sequence[slice], *, name: str
    ) -> torch.Tensor:
        """A part of what is made, from the stretch of the tensor ``name`` that has its entries."""
        wanted, stretch = self.order[part[self.dim]], [*part]
        first = int(wanted.min())
        stretch[self.dim] = slice(first, int(wanted.max()) + 1)
        return read(name, stretch).index_select(self.dim, wanted - first)


def from_hf_state(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Hugging Face weights under our names, of a file or of a model. Experts are copied into stacks; what a run
    keeps of the last step begins as in a new one; DeepSeek's multi-token prediction is left out.

    Raises:
        ConfigError: weights are missing or left over, or in float8; or no architecture of Hugging Face is equal to this
            model.
    """
    return _made(how_to_read(state, config), state)


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
    made, architecture = how_to_write(config, packed=packed), architecture_of(config)
    spare = {name for name in state if name.startswith(_predictors(config, architecture))}
    spare |= {*kept_of_last_step(config), *(["head.weight"] if config.tie_embeddings else [])}
    dense.check_complete(state.keys() - spare, {name for one in made.values() for name in one.reads})
    return _made(made, state)


def how_to_read(names: Collection[str], config: TransformerConfig) -> dict[str, Made]:
    """How each of our tensors is made of theirs.

    Args:
        names: of all that there are.

    Raises:
        ConfigError: as ``from_hf_state``.
    """
    architecture = architecture_of(config)
    packed = any(name.endswith(".experts.gate_up_proj") for name in names)
    plain = _names(config, architecture, packed=packed)
    layers = list(_layers(config, architecture, packed=packed))
    spare = {name for name in names if dense.is_derived(name) or name.startswith(_predictors(config, architecture))}
    if any(name.endswith("weight_scale_inv") for name in names):
        raise ConfigError(
            "these weights are in float8 with factors apart; forge convert, given their folder, multiplies them out"
        )
    if config.tie_embeddings:
        spare.add("lm_head.weight")
    dense.check_complete(set(names) - spare, {*plain.values(), *(name for layer in layers for name in layer.names())})

    made = {ours: Made((theirs,), _turn(ours, config, to_pairs=False)) for ours, theirs in plain.items()}
    for layer in layers:
        made |= layer.read()
    for name, first in kept_of_last_step(config).items():
        made[name] = Made((), functools.partial(torch.full, (moe_of(config).n_experts,), first))
    return made


def how_to_write(config: TransformerConfig, *, packed: bool = False) -> dict[str, Made]:
    """How each of their tensors is made of ours; as ``to_hf_state``."""
    architecture = architecture_of(config)
    made = {
        theirs: Made((ours,), _turn(ours, config, to_pairs=True))
        for ours, theirs in _names(config, architecture, packed=packed).items()
    }
    for layer in _layers(config, architecture, packed=packed):
        made |= layer.write()
    return made


def _made(made: Mapping[str, Made], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.make(*(state[read] for read in one.reads)) for name, one in made.items()}


def _names(config: TransformerConfig, architecture: Architecture, *, packed: bool) -> dict[str, str]:
    """Our name to theirs, of all that is not an expert's."""
    names = dense.decoder_names(config)
    for layer in sparse_layers(config):
        ours, theirs = f"blocks.{layer}.feed_forward", _prefix(layer, architecture, packed=packed)
        for matrix in ("gate", "up", "down"):
            del names[f"{ours}.{matrix}.weight"]
        names[f"{ours}.router.gate.weight"] = f"{theirs}.gate.weight"
        if architecture.has_selection_bias:
            names[f"{ours}.router.bias"] = f"{theirs}.gate.e_score_correction_bias"
        if architecture.shared:
            for matrix, theirs_is in architecture.matrices.items():
                names[f"{ours}.shared.{matrix}.weight"] = f"{theirs}.{architecture.shared}.{theirs_is}.weight"
        if moe_of(config).shared_gate:
            names[f"{ours}.shared.share.weight"] = f"{theirs}.{architecture.shared}_gate.weight"
    return names


def _predictors(config: TransformerConfig, architecture: Architecture) -> tuple[str, ...]:
    """Prefixes of what predicts further tokens, which generation does without: ours, and those of DeepSeek's files."""
    layers = range(config.n_layers, config.n_layers + config.n_predictors)
    theirs = (f"model.layers.{config.n_layers}.",) if architecture.predicts_further else ()
    return (*(f"blocks.{layer}." for layer in layers), *theirs)


def _turn(name: str, config: TransformerConfig, *, to_pairs: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """With the rotated features of latent attention in the other order: we rotate feature ``i`` together with
    ``i + half``, DeepSeek ``2 i`` with ``2 i + 1``. Queries and keys are turned alike, so their products are the same.

    Args:
        name: ours.
        to_pairs: into their order.
    """
    latent = latent_of(config)
    if latent is None or not name.endswith(("attention.q.weight", "attention.kv_down.weight")):
        return as_it_is
    turn = latent.rotary_dim, to_pairs
    if name.endswith("attention.q.weight"):
        heads = torch.arange(config.n_heads * (latent.plain_dim + latent.rotary_dim)).view(config.n_heads, -1)
        plain, rotary = heads.split((latent.plain_dim, latent.rotary_dim), dim=1)  # type: ignore[no-untyped-call]  # torch's
        return Rows(torch.cat([plain, rotary[:, _order(*turn)]], dim=1).flatten())
    return Rows(torch.cat([torch.arange(latent.kv_rank), latent.kv_rank + _order(*turn)]))


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """How a tensor is made that has another name only."""
    return tensor


def _order(rotary_dim: int, to_pairs: bool) -> torch.Tensor:
    features = torch.arange(rotary_dim)
    return (features.view(2, -1) if to_pairs else features.view(-1, 2)).T.flatten()


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

    def read(self) -> dict[str, Made]:
        """Our stacks of their tensors."""
        return {
            f"{self.ours}.{matrix}": Made(
                tuple(self._name(expert, matrix) for expert in range(self.n_experts)), stacked
            )
            for matrix in self.matrices
        }

    def write(self) -> dict[str, Made]:
        """Their tensors of our stacks."""
        return {
            self._name(expert, matrix): Made((f"{self.ours}.{matrix}",), functools.partial(_one_of, expert))
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

    def read(self) -> dict[str, Made]:
        both = (f"{self.theirs}.gate_up_proj",)
        return {
            f"{self.ours}.gate": Made(both, lambda packed: packed.chunk(2, dim=1)[0].contiguous()),
            f"{self.ours}.up": Made(both, lambda packed: packed.chunk(2, dim=1)[1].contiguous()),
            f"{self.ours}.down": Made((f"{self.theirs}.down_proj",), as_it_is),
        }

    def write(self) -> dict[str, Made]:
        both = (f"{self.ours}.gate", f"{self.ours}.up")
        return {
            f"{self.theirs}.gate_up_proj": Made(both, lambda gate, up: torch.cat([gate, up], dim=1)),
            f"{self.theirs}.down_proj": Made((f"{self.ours}.down",), as_it_is),
        }


def stacked(*experts: torch.Tensor) -> torch.Tensor:
    """How a stack is made of experts."""
    return torch.stack(experts)


def _one_of(expert: int, stack: torch.Tensor) -> torch.Tensor:
    return stack[expert].clone()  # a file has no parts of others


def _prefix(layer: int, architecture: Architecture, *, packed: bool) -> str:
    return f"model.layers.{layer}.{'mlp' if packed else architecture.layer}"


def kept_of_last_step(config: TransformerConfig) -> dict[str, float]:
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
