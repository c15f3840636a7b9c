"""Causal self-attention with rotary positions and grouped key-value heads.

Shapes: B = batch, S = sequence, D = width of the residual stream, H = heads, T = columns of the cache.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_plugins_dense.cache import LayerCache
from forge_plugins_dense.config import AttentionBackend, TransformerConfig
from forge_plugins_dense.initial_values import normal
from forge_plugins_dense.norm import init_norm, norm_roles
from forge_plugins_dense.rope import rotate


@attrs.define(eq=False)  # torch.compile cannot trace how a frozen class sets its fields
class BlockInputs:
    """What all blocks share in one forward.

    It is an object and not a tuple on purpose: FSDP casts the floating-point tensors that it finds in a block's
    arguments (also inside containers and dataclasses) to the compute dtype, and angles must stay in fp32.
    """

    cos: torch.Tensor
    """``(B or 1, S, 1, head_dim / 2)`` fp32."""
    sin: torch.Tensor
    """Same as ``cos``."""
    mask: torch.Tensor | BlockMask | None = None
    """``(B or 1, 1, S, T)`` bool, true where the query sees the key."""
    causal: bool = False
    """Without a mask: whether each position sees only itself and earlier ones, or everything."""
    valid: torch.Tensor | None = None
    """``(B, S)`` bool, false at padding."""
    facts: Mapping[str, torch.Tensor] = MappingProxyType({})  # nor can it trace a factory
    """What feed-forward layers need to know of tokens, ``(B, S)`` each (``FeedForward``)."""


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245), without biases."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.q = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.core = AttentionCore(config.attention)
        self.logit_scale = config.logit_scale
        self.qk_norm_over = config.qk_norm_over
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm:
            heads = (config.n_heads, config.kv_heads) if config.qk_norm_over == "all" else (1, 1)
            self.q_norm, self.k_norm = (nn.RMSNorm(n * self.head_dim, eps=config.norm_eps) for n in heads)

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        # The number of heads is left open: under tensor parallelism this rank has a part of them.
        split = (*hidden.shape[:2], -1, self.head_dim)
        q, k, v = self.q(hidden), self.k(hidden), self.v(hidden).view(split)
        if self.q_norm is not None and self.k_norm is not None:
            shape = split if self.qk_norm_over == "head" else (*hidden.shape[:2], -1)
            q, k = self.q_norm(q.view(shape)), self.k_norm(k.view(shape))
        q, k = q.view(split), k.view(split)
        q, k = rotate(q, surroundings.cos, surroundings.sin), rotate(k, surroundings.cos, surroundings.sin)
        if self.logit_scale != 1:
            q = q * self.logit_scale

        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, head_dim)
        if cache is None:
            mixed = self.core(q, k, v, surroundings.mask, surroundings.causal)
        else:  # few queries and all kinds of masks: not what the choice of a kernel was made for
            mixed = attend(q, *cache.append(k, v), surroundings.mask, surroundings.causal, "auto")
        return self.o(mixed.transpose(1, 2).flatten(2))

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``."""
        rng.fill(f"{prefix}q.weight", self.q.weight, normal(std))
        rng.fill(f"{prefix}k.weight", self.k.weight, normal(std))
        rng.fill(f"{prefix}v.weight", self.v.weight, normal(std))
        rng.fill(f"{prefix}o.weight", self.o.weight, normal(residual_std))
        for name, norm in self._norms().items():
            init_norm(norm, rng, f"{prefix}{name}.")

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Whole heads on each rank. The norms of heads work on whichever heads a rank has, with the same weights; norms
        over all heads are refused by the config."""
        plan: dict[str, ShardRole] = {"q": "column", "k": "column", "v": "column", "o": "row"}
        return plan | dict.fromkeys(self._norms(), "replicate")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        roles: dict[str, ParameterRole] = {f"{name}.weight": "matrix" for name in "qkvo"}
        for name, norm in self._norms().items():
            roles |= norm_roles(norm, f"{name}.")
        return roles

    def active_parameters(self) -> int:
        """Weights of the four projections."""
        return sum(projection.weight.numel() for projection in (self.q, self.k, self.v, self.o))

    def _norms(self) -> dict[str, nn.Module]:
        return {name: norm for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)) if norm is not None}


class AttentionCore(nn.Module):
    """What happens between positions, as a module without parameters: ``context_plan`` names it."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | BlockMask | None, causal: bool
    ) -> torch.Tensor:
        """Same as ``attend``."""
        return attend(q, k, v, mask, causal, self.backend)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | BlockMask | None,
    causal: bool,
    backend: AttentionBackend,
) -> torch.Tensor:
    """Softmax attention, scaled by ``1 / √head_dim``. Fewer key-value heads than query heads are never copied.

    Args:
        q: ``(B, H, S, head_dim)``.
        k, v: ``(B, H_kv, T, head_dim)``, ``H`` a multiple of ``H_kv``; values may have their own ``head_dim``.
        mask, causal: as in ``BlockInputs``.

    Returns:
        ``(B, H, S, head_dim of v)``.
    """
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Inside a compiled block the call is compiled with it; outside, only the compiled kernel is worth having.
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    choice = contextlib.nullcontext() if backend in ("auto", "flex") else sdpa_kernel(_KERNELS[backend])
    with choice:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@functools.cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention)
