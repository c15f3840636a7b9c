"""The fusion ``cross_attention``: some layers look at images.

Shapes: B = batch, S = sequence, D = width of the residual stream, H = heads, F = image tokens of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.contracts.observation import Site, within
from forge_plugins_dense.attention import AttentionCore, BlockInputs
from forge_plugins_dense.attention_sites import core_sites
from forge_plugins_dense.block import STREAM, Block, generating
from forge_plugins_dense.cache import LayerCache
from forge_plugins_dense.initial_values import normal, zeros
from forge_plugins_dense.norm import init_norm, make_norm, norm_roles
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.fusions.config import CrossAttentionConfig
from forge_plugins_vlm.visibility import sees_images, visible_tokens


class CrossAttentionFusion:
    """Layers of their own between those of the decoder (Flamingo, Alayrac et al. 2022, arXiv 2204.14198), or in place
    of some (Llama 3.2 Vision). Gates are closed at first, or output projections 0: the model begins as the decoder
    alone."""

    def __init__(self, config: CrossAttentionConfig, *, model: VisionLanguageConfig, build: Builder) -> None:
        self._config, self._model, self._build = config, model, build

    def block(self, layer: int) -> nn.Module:
        """Same as ``Fusion.block``."""
        if layer not in self._config.layers_of(self._model.n_layers):
            return Block(self._model, layer, self._build)
        looking = LookingBlock(self._config, self._model, layer, self._build)
        return looking if self._config.place == "replace" else InsertedBlock(self._model, layer, self._build, looking)


class LookingBlock(nn.Module):
    """``h ← h + tanh(g_a) · CA(norm(h), images)``, then ``h ← h + tanh(g_f) · FFN(norm(h))``, at positions that see an
    image; others stay as they are."""

    def __init__(self, config: CrossAttentionConfig, model: VisionLanguageConfig, layer: int, build: Builder) -> None:
        super().__init__()
        norm = functools.partial(make_norm, model.norm, model.dim, model.norm_eps, build)
        self.attention_norm = norm()
        self.attention = ImageAttention(config, model, build)
        self.attention_gate = Gate(config)
        self.feed_forward_norm = norm()
        own = model.layer(layer)
        self.feed_forward: Any = build(own.feed_forward, dim=model.dim, layer=layer, n_layers=model.n_layers)
        self.feed_forward_gate = Gate(config)
        self._gated = config.gated

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        sees = sees_images(surroundings.facts["image_range"])
        update = self.attention(self.attention_norm(hidden), surroundings, cache)
        hidden = hidden + self.attention_gate(update, sees)
        facts = {name: surroundings.facts[name] for name in getattr(self.feed_forward, "needs", ())}
        valid = sees if surroundings.valid is None else surroundings.valid & sees
        with generating(self.feed_forward) if cache is not None else nullcontext():
            update = self.feed_forward(self.feed_forward_norm(hidden), valid, **facts)
        fed: torch.Tensor = hidden + self.feed_forward_gate(update, sees)
        return fed

    @property
    def needs(self) -> frozenset[str]:
        """Same as ``Block.needs``."""
        own = {"image_tokens", "image_tile", "image_range"}
        return frozenset(own) | frozenset(getattr(self.feed_forward, "needs", ()))

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``Block.init_weights``."""
        for name in ("attention_norm", "feed_forward_norm"):
            init_norm(getattr(self, name), rng, f"{prefix}{name}.")
        for name in ("attention", "feed_forward"):
            getattr(self, name).init_weights(rng, f"{prefix}{name}.", residual_std if self._gated else 0.0, std)
            if self._gated:
                rng.fill(f"{prefix}{name}_gate.weight", getattr(self, f"{name}_gate").weight, zeros)

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``Block.parallel_plan``."""
        plan: dict[str, ShardRole] = {"attention_norm": "sequence", "feed_forward_norm": "sequence"}
        plan |= {"attention_gate": "residual", "feed_forward_gate": "residual"}
        plan |= {f"attention.{name}": role for name, role in self.attention.parallel_plan().items()}
        for name, role in self.feed_forward.parallel_plan().items():
            plan[f"feed_forward.{name}" if name else "feed_forward"] = role
        return plan

    def context_plan(self) -> list[str]:
        """Same as ``Block.context_plan``: each rank has all image tokens."""
        return []

    def recompute_plan(self) -> Mapping[str, Recompute]:
        """Same as ``Block.recompute_plan``."""
        layer = self.feed_forward
        return layer.recompute_plan() if hasattr(layer, "recompute_plan") else {}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Block.parameter_roles``."""
        gates = ("attention_gate.weight", "feed_forward_gate.weight") if self._gated else ()
        roles: dict[str, ParameterRole] = dict.fromkeys(gates, "bias")
        for name in ("attention_norm", "feed_forward_norm"):
            roles |= norm_roles(getattr(self, name), f"{name}.")
        for part in ("attention", "feed_forward"):
            roles |= {f"{part}.{name}": role for name, role in getattr(self, part).parameter_roles().items()}
        return roles

    def parameter_aliases(self) -> dict[str, list[str]]:
        """Same as ``AliasedModel.parameter_aliases``, of this block."""
        gates = {"gates": ["attention_gate.*", "feed_forward_gate.*"]} if self._gated else {}
        return {"cross_attention": ["*"], **gates}

    def active_parameters(self) -> int:
        """Weights of matrices that are multiplied for one token of text; those of images are in ``flops_of_images``."""
        own = sum(getattr(self.attention, name).weight.numel() for name in ("q", "o"))
        return int(own + self.feed_forward.active_parameters())

    def mixing_flops(self, seq_len: int) -> float:
        """Same as ``Block.mixing_flops``: ``FusionConfig.flops_of_images`` counts by image tokens."""
        return 0.0

    def sites(self) -> dict[str, Site]:
        """Same as ``Block.sites``."""
        return {
            "resid_pre": Site(module="", where="input", dims=STREAM),
            "attn_in": Site(module="attention_norm", dims=STREAM),
            **{name: within("attention", site) for name, site in self.attention.sites().items()},
            "attn_out": Site(module="attention", dims=STREAM),
            "resid_mid": Site(module="feed_forward_norm", where="input", dims=STREAM),
            "mlp_in": Site(module="feed_forward_norm", dims=STREAM),
            "mlp_out": Site(module="feed_forward", dims=STREAM),
            "resid_post": Site(module="", dims=STREAM),
        }


class InsertedBlock(Block):
    """A block of the decoder with a ``LookingBlock`` before it, as ``looking``."""

    def __init__(self, config: VisionLanguageConfig, layer: int, build: Builder, looking: LookingBlock) -> None:
        super().__init__(config, layer, build)
        self.looking = looking

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        return super().forward(self.looking(hidden, surroundings, cache), surroundings, cache)

    @property
    def needs(self) -> frozenset[str]:
        """Same as ``Block.needs``."""
        return super().needs | self.looking.needs

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        super().init_weights(rng, prefix, residual_std, std)
        self.looking.init_weights(rng, f"{prefix}looking.", residual_std, std)

    def parallel_plan(self) -> dict[str, ShardRole]:
        own = self.looking.parallel_plan()
        return super().parallel_plan() | {f"looking.{name}": role for name, role in own.items()}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        own = self.looking.parameter_roles()
        return super().parameter_roles() | {f"looking.{name}": role for name, role in own.items()}

    def parameter_aliases(self) -> dict[str, list[str]]:
        """Same as ``AliasedModel.parameter_aliases``, of this block."""
        own = self.looking.parameter_aliases()
        return {alias: [f"looking.{pattern}" for pattern in patterns] for alias, patterns in own.items()}

    def active_parameters(self) -> int:
        return int(super().active_parameters()) + self.looking.active_parameters()

    def sites(self) -> dict[str, Site]:
        """Same as ``Block.sites``, and those of ``looking``."""
        own = {f"looking.{name}": within("looking", site) for name, site in self.looking.sites().items()}
        return super().sites() | own


class ImageAttention(nn.Module):
    """Text attends to image tokens: no rotary positions, queries and keys normed by head, as in Llama 3.2 Vision."""

    def __init__(self, config: CrossAttentionConfig, model: VisionLanguageConfig, build: Builder) -> None:
        super().__init__()
        n_heads, kv_heads, self.head_dim = config.heads_of(model)
        self.latest = config.attend == "latest"
        self.image_norm = make_norm(model.norm, model.dim, model.norm_eps, build) if config.norm_images else None
        self.q = nn.Linear(model.dim, n_heads * self.head_dim, bias=False)
        self.k = nn.Linear(model.dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(model.dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(n_heads * self.head_dim, model.dim, bias=False)
        self.q_norm, self.k_norm = (make_norm("rmsnorm", self.head_dim, model.norm_eps) for _ in range(2))
        self.core = AttentionCore(model.attention if model.attention in ("auto", "math") else "auto")

    def forward(self, text: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``. A position that sees no image gets something that its gate drops."""
        k, v, visible = self._seen(surroundings, cache)
        q = self.q_norm(self.q(text).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        mixed = self.core(q, k, v, visible, False)
        given: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return given

    def sites(self) -> dict[str, Site]:
        """Same as ``Attention.sites``, of the attention to image tokens."""
        found = {}
        for name in ("attn_scores", "attn_pattern", "z"):
            site = core_sites()[name]
            dims = tuple("image_token" if dim == "key" else dim for dim in site.dims)
            found[name] = attrs.evolve(site, dims=dims)
        return found

    def _seen(
        self, surroundings: BlockInputs, cache: LayerCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values ``(B, H_kv, F, head_dim)``, and which of them a position sees, ``(B, 1, S, F)`` bool. With a
        cache, keys and values are computed once, and the mask once for all tokens that see what the last one saw."""
        bounds = surroundings.facts["image_range"]
        if cache is not None and cache.beside:
            k, v, tile, known, visible = cache.beside
            if known is bounds:
                return k, v, visible
        else:
            k, v = self._keys(surroundings.facts["image_tokens"])
            tile = surroundings.facts["image_tile"]
        visible = visible_tokens(bounds, tile, latest=self.latest)[:, None]
        if cache is not None:
            cache.beside = (k, v, tile, bounds, visible)
        return k, v, visible

    def _keys(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.image_norm is not None:
            images = self.image_norm(images)
        k, v = (part(images).unflatten(-1, (-1, self.head_dim)) for part in (self.k, self.v))
        return self.k_norm(k).transpose(1, 2), v.transpose(1, 2)

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``Attention.init_weights``."""
        for name in ("q", "k", "v", "o"):
            rng.fill(f"{prefix}{name}.weight", getattr(self, name).weight, normal(residual_std if name == "o" else std))
        for name in self._norms:
            init_norm(getattr(self, name), rng, f"{prefix}{name}.")

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``Attention.parallel_plan``. The norm of images feeds this rank's heads alone."""
        return {"q": "column", "k": "column", "v": "column", "o": "row", **dict.fromkeys(self._norms, "replicate")}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Attention.parameter_roles``."""
        roles: dict[str, ParameterRole] = {f"{name}.weight": "matrix" for name in ("q", "k", "v", "o")}
        for name in self._norms:
            roles |= norm_roles(getattr(self, name), f"{name}.")
        return roles

    @property
    def _norms(self) -> list[str]:
        return ["q_norm", "k_norm", *(["image_norm"] if self.image_norm is not None else [])]


class Gate(nn.Module):
    """``tanh(scale · g)`` times an update of the residual stream, or the update; and nothing where no image is seen."""

    def __init__(self, config: CrossAttentionConfig) -> None:
        super().__init__()
        self.scale = config.gate_scale
        self.weight = nn.Parameter(torch.empty(1)) if config.gated else None

    def forward(self, update: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        """``(B, S, D)`` and ``(B, S)`` bool to ``(B, S, D)``."""
        if self.weight is not None:
            update = update * torch.tanh(self.scale * self.weight).to(update.dtype)
        return torch.where(sees[..., None], update, 0.0)
