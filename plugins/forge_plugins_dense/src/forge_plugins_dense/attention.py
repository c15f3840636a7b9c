"""Causal self-attention with rotary positions and grouped key-value heads.

Shapes: B = batch, S = sequence, D = width of the residual stream, H = heads, T = columns of the cache.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_dense.attention_sites import core_sites, output_sites
from forge_plugins_dense.cache import LayerCache
from forge_plugins_dense.config import AttentionBackend, TransformerConfig
from forge_plugins_dense.dropout import drop_weights
from forge_plugins_dense.initial_values import normal, zeros
from forge_plugins_dense.layer_config import Layer
from forge_plugins_dense.mask import causal_mask
from forge_plugins_dense.norm import NormOverHeads, init_norm, make_norm, norm_roles
from forge_plugins_dense.norm_config import ZERO_CENTERED_RMSNORM
from forge_plugins_dense.rope import rotate
from forge_plugins_dense.sinks import Sinks, beside_sinks, rescale


@attrs.define(eq=False)  # torch.compile cannot trace how a frozen class sets its fields
class BlockInputs:
    """What blocks are given in one forward; those with the same window and rotary frequencies share it.

    It is an object and not a tuple on purpose: FSDP casts the floating-point tensors that it finds in a block's
    arguments (also inside containers and dataclasses) to the compute dtype, and angles must stay in fp32.
    """

    cos: torch.Tensor
    """``(B or 1, S, 1, R / 2)`` fp32, for the R features of a head that are rotated; R may be 0."""
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
    noise: torch.Tensor | None = None
    """``(B, S)`` int64, a number of each token in this layer, which decides on what is dropped in training, and is the
    fact ``noise``; ``None``: torch does."""

    def of_layer(self, noise: torch.Tensor) -> BlockInputs:
        """The same with other numbers."""
        facts = {**self.facts, "noise": noise} if "noise" in self.facts else self.facts
        return BlockInputs(self.cos, self.sin, self.mask, self.causal, self.valid, facts, noise)

    def of_tokens(self, valid: torch.Tensor) -> BlockInputs:
        """The same for some of the tokens, ``(B, S)`` bool, the rest as if it were padding to feed-forward layers."""
        return BlockInputs(self.cos, self.sin, self.mask, self.causal, valid, self.facts, self.noise)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        layer: its window is for what attention costs; ``BlockInputs`` says which positions are seen.
        build: same as of ``make_norm``.
    """

    def __init__(self, config: TransformerConfig, layer: Layer, build: Builder | None = None) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.n_heads, self.window = config.n_heads, layer.window
        has_bias = config.attention_bias != "none"
        self.q = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=has_bias)
        self.k = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=has_bias)
        self.v = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=has_bias)
        self.o = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=config.attention_bias == "all")
        self.core = AttentionCore(config.attention, config.attention_softcap, config.attention_dropout)
        self.sinks = Sinks(config.n_heads) if layer.attention_sinks else None
        self.logit_scale = config.logit_scale(layer)
        self.qk_norm_over = config.qk_norm_over
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm and config.qk_norm_over == "all":
            zero_centered = config.norm == ZERO_CENTERED_RMSNORM
            self.q_norm, self.k_norm = (
                NormOverHeads(n * self.head_dim, config.norm_eps, zero_centered=zero_centered)
                for n in (config.n_heads, config.kv_heads)
            )
        elif config.qk_norm:
            given = config.head_norm, self.head_dim, config.norm_eps, build
            self.q_norm, self.k_norm = (make_norm(*given) for _ in range(2))

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        output: torch.Tensor = self.o(self.mix(*self.project(hidden, surroundings), surroundings, cache))
        return output

    def project(
        self, hidden: torch.Tensor, surroundings: BlockInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of ``(B, S, D)``, normed and rotated: ``(B, S, heads, head_dim)`` each."""
        return self.in_heads(self.q(hidden), self.k(hidden), self.v(hidden), surroundings)

    def in_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, surroundings: BlockInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``project`` gives, from what ``q``, ``k`` and ``v`` give: ``(B, S, heads · head_dim)`` each."""
        # The number of heads is left open: under tensor parallelism this rank has a part of them.
        split = (*q.shape[:2], -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            shape = split if self.qk_norm_over == "head" else (*q.shape[:2], -1)
            q, k = self.q_norm(q.view(shape)), self.k_norm(k.view(shape))
        q, k, v = q.view(split), k.view(split), v.view(split)
        q, k = rotate(q, surroundings.cos, surroundings.sin), rotate(k, surroundings.cos, surroundings.sin)
        if self.logit_scale != 1:
            q = q * self.logit_scale
        return q, k, v

    def mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        surroundings: BlockInputs,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """What heads read, ``(B, S, H · head_dim)``, from what ``project`` gives."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, head_dim)
        sinks = None if self.sinks is None else self.sinks()
        if cache is not None:
            k, v = cache.append(k, v)
        given = surroundings.mask, surroundings.causal, sinks, surroundings.noise
        mixed: torch.Tensor = self.core(q, k, v, *given, cached=cache is not None)
        return mixed.transpose(1, 2).flatten(2)

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``."""
        for name, projection in self._projections().items():
            rng.fill(f"{prefix}{name}.weight", projection.weight, normal(residual_std if name == "o" else std))
            if projection.bias is not None:
                rng.fill(f"{prefix}{name}.bias", projection.bias, zeros)
        for name, norm in self._norms().items():
            init_norm(norm, rng, f"{prefix}{name}.")
        if self.sinks is not None:
            rng.fill(f"{prefix}sinks.bias", self.sinks.bias, zeros)

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Whole heads on each rank. The norms of single heads work on the heads of this rank, with the same weights."""
        plan: dict[str, ShardRole] = {"q": "column", "k": "column", "v": "column", "o": "row"}
        if self.sinks is not None:
            plan["sinks"] = "column"
        if self.core.dropout:
            plan["core"] = "replicate"
        return plan | dict.fromkeys(self._norms(), "column" if self.qk_norm_over == "all" else "replicate")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        roles: dict[str, ParameterRole] = {}
        for name, projection in self._projections().items():
            roles |= {
                f"{name}.{key}": "bias" if key == "bias" else "matrix" for key, _ in projection.named_parameters()
            }
        for name, norm in self._norms().items():
            roles |= norm_roles(norm, f"{name}.")
        return roles if self.sinks is None else {**roles, "sinks.bias": "bias"}

    def active_parameters(self) -> int:
        """Weights of the four projections."""
        return sum(projection.weight.numel() for projection in self._projections().values())

    def mixing_flops(self, seq_len: int) -> float:
        """Same as ``SequenceMixer.mixing_flops``."""
        return 12.0 * self.n_heads * self.head_dim * min(seq_len, self.window or seq_len)

    def context_plan(self) -> list[str]:
        """Same as ``SequenceMixer.context_plan``."""
        return ["core"]

    def sites(self) -> dict[str, Site]:
        """Same as ``ObservableModule.sites``."""
        flat = ("sample", "position", "features")
        own = {name: Site(module=name, dims=flat) for name in ("q", "k", "v")}
        return own | core_sites() | output_sites(self.head_dim)

    def _projections(self) -> dict[str, nn.Linear]:
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o}

    def _norms(self) -> dict[str, nn.Module]:
        return {name: norm for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)) if norm is not None}


class AttentionCore(nn.Module):
    """What happens between positions, as a module without parameters: ``context_plan`` names it.

    Args:
        pad_values: whether kernels are given values as wide as keys, padded with zeros.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        softcap: float | None = None,
        dropout: float = 0.0,
        *,
        pad_values: bool = False,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.softcap = softcap
        self.dropout = dropout
        self.pad_values = pad_values
        self.part = 0  # of the heads, the one that is here

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | BlockMask | None,
        causal: bool,
        sinks: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        *,
        cached: bool = False,
    ) -> torch.Tensor:
        """Same as ``attend``, in training with weights dropped by ``BlockInputs.noise``.

        Args:
            cached: keys and values come from a cache. Few queries and all kinds of masks are not what a kernel was
                chosen for.
        """
        if self.training and self.dropout and not cached:
            if isinstance(mask, BlockMask):
                raise ConfigError(
                    "model.attention_dropout: context parallelism on CUDA keeps no weights that could be dropped; set "
                    "it to 0, or parallel.cp = 1"
                )
            drop = functools.partial(drop_weights, rate=self.dropout, noise=noise, part=self.part)
            return _attend_explicitly(q, k, v, mask, causal, self.softcap, sinks, drop)
        backend: AttentionBackend = "auto" if cached else self.backend
        if not self.pad_values:
            return attend(q, k, v, mask, causal, backend, self.softcap, sinks)
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return attend(q, k, padded, mask, causal, backend, self.softcap, sinks)[..., : v.shape[-1]]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | BlockMask | None,
    causal: bool,
    backend: AttentionBackend,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention, scaled by ``1 / √head_dim``. Fewer key-value heads than query heads are never copied.

    Args:
        q: ``(B, H, S, head_dim)``.
        k, v: ``(B, H_kv, T, head_dim)``, ``H`` a multiple of ``H_kv``; values may have their own ``head_dim``.
        mask, causal: as in ``BlockInputs``.
        softcap: logits become ``softcap · tanh(logits / softcap)``; ``None``: they stay as they are.
        sinks: ``(H,)``, a logit more of each head, not capped and without a value; ``None``: there is none.

    Returns:
        ``(B, H, S, head_dim of v)``.
    """
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Inside a compiled block the call is compiled with it; outside, only the compiled kernel is worth having.
        eager: Callable[..., Any] = flex_attention
        flex = eager if torch.compiler.is_compiling() else _compiled_flex_attention()
        capped = None if softcap is None else _capping(softcap)
        if sinks is None:
            attended: torch.Tensor = flex(q, k, v, score_mod=capped, block_mask=mask, enable_gqa=grouped)
            return attended
        with_sums = AuxRequest(lse=True)
        mixed, sums = flex(q, k, v, score_mod=capped, block_mask=mask, enable_gqa=grouped, return_aux=with_sums)
        return rescale(mixed, sums.lse, sinks)
    if softcap is not None:
        return _attend_explicitly(q, k, v, mask, causal, softcap, sinks)
    choice = contextlib.nullcontext() if backend in ("auto", "flex") else sdpa_kernel(_KERNELS[backend])
    with choice:
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        scale, first, features = 1 / math.sqrt(q.shape[-1]), int(causal), v.shape[-1]
        q, k, v, mask = beside_sinks(q, k, v, mask, causal, sinks)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return mixed[:, :, first:, :features]


def _attend_explicitly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """By plain products; the logits ``(B, H_kv, H / H_kv, S, T)`` exist in fp32."""
    q = q.unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]  # torch's
    logits = (q @ k.unsqueeze(2).mT).float() / math.sqrt(q.shape[-1])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        mask = causal_mask(logits.shape[-1], 0, logits.device)[None, None]
    if mask is not None:
        logits = logits.masked_fill(~mask.unsqueeze(1), -math.inf)
    if sinks is not None:
        of_sinks = sinks.float().view(k.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((of_sinks, logits), dim=-1)
    weights = logits.softmax(-1) if sinks is None else logits.softmax(-1)[..., 1:]
    if drop is not None:
        weights = drop(weights.flatten(1, 2)).view_as(weights)
    return (weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)


@functools.cache  # one function a cap, by which compiled kernels are found again
def _capping(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)
