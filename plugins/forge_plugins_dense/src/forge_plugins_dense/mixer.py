"""Mixers: the half of a block that works between positions.

Shapes: B = batch, S = sequence, D = width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_plugins_dense.attention import Attention, BlockInputs
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.latent_attention import LatentAttention
from forge_plugins_dense.latent_config import LatentAttentionConfig


class SequenceMixer(Protocol):
    """An ``nn.Module`` that maps ``(B, S, D)`` to ``(B, S, D)``: what a position gets depends on it and on those before
    it, of its own document.

    It may have ``needs``, as ``FeedForward`` has, for what it needs to know of tokens, which is in
    ``surroundings.facts``: ``sequence`` numbers documents. It may have two methods more:

    - ``make_cache(batch_size, max_len)``: what it keeps while text is generated, in place of keys and values of all
      positions.
    - ``context_plan()``: the modules in it that compute attention, as ``ContextParallelModel`` has them. Without it,
      ``parallel.cp`` is refused.
    """

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: Any = None) -> torch.Tensor:
        """The mixer's share of the residual stream, ``(B, S, D)`` in the dtype of ``hidden``.

        Args:
            hidden: ``(B, S, D)``.
            surroundings: rotary tables, the mask, which positions are padding (``valid``), and ``facts``.
            cache: what ``make_cache`` gave, or a ``LayerCache``; these positions follow the ones that it has seen. The
                first call of a row may have padding on its left.
        """
        ...

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``."""
        ...

    def parallel_plan(self) -> Mapping[str, ShardRole]:
        """Same as ``FeedForward.parallel_plan``."""
        ...

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        ...

    def active_parameters(self) -> int:
        """Weights of matrices that are multiplied for one token."""
        ...

    def mixing_flops(self, seq_len: int) -> float:
        """FLOPs a token, forward and backward, of what happens between positions; of attention ``12 · D · S`` (PaLM,
        appendix B), where a window makes ``S`` smaller."""
        ...


class SequenceMixerFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, model: TransformerConfig, layer: int, build: Builder) -> nn.Module:
        """Build the mixer of block ``layer``.

        Args:
            model: the decoder's own keys, such as ``dim``, ``n_heads``, ``head_size`` and ``norm_eps``.
        """
        ...


def attention(_: object, /, *, model: TransformerConfig, layer: int, build: Builder | None = None) -> Attention:
    """The mixer ``attention``: as the decoder's own keys describe it."""
    return Attention(model, model.layer(layer), build)


def latent(config: LatentAttentionConfig, /, *, model: TransformerConfig, layer: int) -> LatentAttention:
    """The mixer ``latent``."""
    return LatentAttention(model, config, model.layer(layer))
