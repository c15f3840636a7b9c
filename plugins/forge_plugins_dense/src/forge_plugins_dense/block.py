"""A block of the decoder.

Shapes: B = batch, S = sequence, D = width of the residual stream.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.contracts.observation import ObservableModule, Site, within
from forge_core.errors import ConfigError
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.cache import LayerCache
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.dropout import Dropout
from forge_plugins_dense.mixer import attention
from forge_plugins_dense.norm import init_norm, make_norm, norm_roles

STREAM = ("sample", "position", "width")
"""The dimensions of the residual stream."""


class Block(nn.Module):
    """A mixer, such as attention, and a feed-forward layer, each reading from and adding to the residual stream."""

    def __init__(self, config: TransformerConfig, layer: int, build: Builder) -> None:
        super().__init__()
        own = config.layer(layer)
        norm = functools.partial(make_norm, config.norm, config.dim, config.norm_eps, build)
        reads, gives = config.norm_placement != "output", config.norm_placement != "input"
        self.attention_norm = norm() if reads else nn.Identity()
        self.attention = (
            attention(None, model=config, layer=layer, build=build)
            if own.mixer is None
            else build(own.mixer, model=config, layer=layer)
        )
        self.attention_output_norm = norm() if gives else None
        self.feed_forward_norm = norm() if reads else nn.Identity()
        self.feed_forward = build(own.feed_forward, dim=config.dim, layer=layer, n_layers=config.n_layers)
        self.feed_forward_output_norm = norm() if gives else None
        self.mixed_dropout: Dropout | None = None
        self.changed_dropout: Dropout | None = None
        if config.residual_dropout:
            self.mixed_dropout, self.changed_dropout = (Dropout(config.residual_dropout, place) for place in (1, 2))
        self.residual_multiplier = config.residual_multiplier
        self.parallel_residual = config.parallel_residual

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        mixed = self.mixed(hidden, surroundings, cache)
        if self.mixed_dropout is not None:
            mixed = self.mixed_dropout(mixed, surroundings.noise)
        added = hidden + times(self.residual_multiplier, mixed)

        changed = self.changed(hidden if self.parallel_residual else added, surroundings, generates=cache is not None)
        if self.changed_dropout is not None:
            changed = self.changed_dropout(changed, surroundings.noise)
        return added + times(self.residual_multiplier, changed)

    def mixed(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None) -> torch.Tensor:
        """The mixer's share of the residual stream, ``(B, S, D)``."""
        mixed: torch.Tensor = self.attention(self.attention_norm(hidden), surroundings, cache)
        return mixed if self.attention_output_norm is None else self.attention_output_norm(mixed)

    def changed(self, hidden: torch.Tensor, surroundings: BlockInputs, *, generates: bool) -> torch.Tensor:
        """The feed-forward layer's share of the residual stream, ``(B, S, D)``.

        Args:
            generates: text is generated.
        """
        facts = {name: surroundings.facts[name] for name in self._layer_needs}
        with generating(self.feed_forward) if generates else nullcontext():
            changed: torch.Tensor = self.feed_forward(self.feed_forward_norm(hidden), surroundings.valid, **facts)
        return changed if self.feed_forward_output_norm is None else self.feed_forward_output_norm(changed)

    @property
    def needs(self) -> frozenset[str]:
        """What its layers need to know of tokens."""
        return self._layer_needs | frozenset(getattr(self.attention, "needs", ()))

    @property
    def _layer_needs(self) -> frozenset[str]:
        return frozenset(getattr(self.feed_forward, "needs", ()))

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``."""
        for name, norm in self._norms().items():
            init_norm(norm, rng, f"{prefix}{name}.")
        self.attention.init_weights(rng, f"{prefix}attention.", residual_std, std)
        self.feed_forward.init_weights(rng, f"{prefix}feed_forward.", residual_std, std)

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``FeedForward.parallel_plan``."""
        plan: dict[str, ShardRole] = {
            name: "residual" if name.endswith("output_norm") else "sequence" for name in self._norms()
        }
        if self.mixed_dropout is not None:
            plan |= {"mixed_dropout": "residual", "changed_dropout": "residual"}
        plan |= {f"attention.{name}": role for name, role in self.attention.parallel_plan().items()}
        for name, role in self.feed_forward.parallel_plan().items():
            plan[f"feed_forward.{name}" if name else "feed_forward"] = role
        return plan

    def context_plan(self) -> list[str]:
        """Same as ``ContextParallelModel.context_plan``, names relative to this module.

        Raises:
            ConfigError: the mixer does not say how it works on a part of a sequence.
        """
        mixer: Any = self.attention
        if not hasattr(mixer, "context_plan"):
            raise ConfigError(
                f"parallel.cp: the mixer {type(mixer).__qualname__} has no context_plan, so that its sequences cannot "
                "be split over ranks; set parallel.cp = 1"
            )
        return [f"attention.{name}" for name in mixer.context_plan()]

    def recompute_plan(self) -> Mapping[str, Recompute]:
        """Same as ``Model.recompute_plan``, for operations that other layers do not have."""
        layer: Any = self.feed_forward
        return layer.recompute_plan() if hasattr(layer, "recompute_plan") else {}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        roles: dict[str, ParameterRole] = {}
        for name, norm in self._norms().items():
            roles |= norm_roles(norm, f"{name}.")
        for part in ("attention", "feed_forward"):
            roles |= {f"{part}.{name}": role for name, role in getattr(self, part).parameter_roles().items()}
        return roles

    def active_parameters(self) -> int:
        """Weights of matrices that are multiplied for one token."""
        weights: int = self.attention.active_parameters() + self.feed_forward.active_parameters()
        return weights

    def mixing_flops(self, seq_len: int) -> float:
        """Same as ``SequenceMixer.mixing_flops``."""
        mixer: Any = self.attention
        flops: float = mixer.mixing_flops(seq_len)
        return flops

    def sites(self) -> dict[str, Site]:
        """Same as ``ObservableModule.sites``, with those of its mixer and its feed-forward layer.

        Where both read the same hidden states (``parallel_residual``), there is no ``resid_mid``.
        """
        found = {
            "resid_pre": Site(module="", where="input", dims=STREAM),
            "attn_in": Site(module="attention_norm", dims=STREAM),
            **sites_within("attention", self.attention),
            "attn_out": Site(module="attention", dims=STREAM),
            "resid_mid": Site(module="feed_forward_norm", where="input", dims=STREAM),
            "mlp_in": Site(module="feed_forward_norm", dims=STREAM),
            **sites_within("feed_forward", self.feed_forward),
            "mlp_out": Site(module="feed_forward", dims=STREAM),
            "resid_post": Site(module="", dims=STREAM),
        }
        if self.parallel_residual:
            del found["resid_mid"]
        return found

    def _norms(self) -> dict[str, nn.Module]:
        """In the order of the block; those of inputs are there in any case, as ``tensor_parallel`` gathers behind
        them."""
        names = ("attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm")
        return {name: norm for name in names if (norm := getattr(self, name)) is not None}


def sites_within(name: str, module: nn.Module) -> dict[str, Site]:
    """Sites that a module of the block declares, seen from the block."""
    if not isinstance(module, ObservableModule):
        return {}
    return {key: within(name, site) for key, site in module.sites().items()}


@contextmanager
def generating(layer: Any) -> Iterator[None]:
    """A feed-forward layer, called, does what it does when text is generated. It is called as a module, so that its
    hooks run."""
    if not hasattr(layer, "generate"):
        yield
        return
    layer.forward = layer.generate
    try:
        yield
    finally:
        del layer.forward


def times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    """The product; the tensor itself where the factor is 1."""
    return tensor if factor == 1 else tensor * factor
