"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shapes: B = batch, S = sequence, D = width of the residual stream, H = heads, T = columns of the cache, R = ``kv_rank``.
"""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import Site
from forge_plugins_dense.attention import AttentionCore, BlockInputs
from forge_plugins_dense.attention_sites import core_sites, output_sites
from forge_plugins_dense.cache import LayerCache
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.initial_values import normal
from forge_plugins_dense.latent_config import LatentAttentionConfig
from forge_plugins_dense.layer_config import Layer
from forge_plugins_dense.norm import init_norm, norm_roles
from forge_plugins_dense.rope import rotate


class LatentAttention(nn.Module):
    """Keys and values of all heads are linear in a latent of R features a position. Positions are in further features
    of queries and keys, of which all heads share the keys. The cache keeps the latent and those shared keys.
    """

    def __init__(self, config: TransformerConfig, latent: LatentAttentionConfig, layer: Layer) -> None:
        super().__init__()
        self.n_heads, self.window = config.n_heads, layer.window
        self.plain_dim, self.rotary_dim, self.value_dim = latent.plain_dim, latent.rotary_dim, latent.value_dim
        self.kv_rank = latent.kv_rank
        self.logit_scale = config.logit_scale(layer)
        self.q_down: nn.Linear | None = None
        if latent.q_rank is not None:
            self.q_down = nn.Linear(config.dim, latent.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(latent.q_rank, eps=config.norm_eps)
        q_width = config.n_heads * (latent.plain_dim + latent.rotary_dim)
        self.q = nn.Linear(latent.q_rank or config.dim, q_width, bias=False)
        self.kv_down = nn.Linear(config.dim, latent.kv_rank + latent.rotary_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=config.norm_eps)
        self.kv_up = nn.Linear(latent.kv_rank, config.n_heads * (latent.plain_dim + latent.value_dim), bias=False)
        self.o = nn.Linear(config.n_heads * latent.value_dim, config.dim, bias=False)
        chosen = config.attention, config.attention_softcap, config.attention_dropout
        self.core = AttentionCore(*chosen, pad_values=latent.pad_values)

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        q = self._queries(hidden, surroundings)
        latent, k_rotary = self.kv_down(hidden).split((self.kv_rank, self.rotary_dim), dim=-1)
        latent = self.kv_norm(latent).unsqueeze(1)  # (B, 1, S, R), as one head
        k_rotary = rotate(k_rotary.unsqueeze(2), surroundings.cos, surroundings.sin).transpose(1, 2)
        if cache is not None:
            latent, k_rotary = cache.append(latent, k_rotary)

        # The number of heads is left open: under tensor parallelism this rank has a part of them.
        kv = self.kv_up(latent.squeeze(1)).unflatten(-1, (-1, self.plain_dim + self.value_dim)).transpose(1, 2)
        k_plain, v = kv.split((self.plain_dim, self.value_dim), dim=-1)
        k = torch.cat((k_plain, k_rotary.expand(-1, k_plain.shape[1], -1, -1)), dim=-1)

        given = surroundings.mask, surroundings.causal, None, surroundings.noise
        mixed = self.core(q, k, v, *given, cached=cache is not None)
        output: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return output

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``."""
        for name, module in self._weighted().items():
            if isinstance(module, nn.Linear):
                rng.fill(f"{prefix}{name}.weight", module.weight, normal(residual_std if name == "o" else std))
            else:
                init_norm(module, rng, f"{prefix}{name}.")

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Whole heads on each rank, each of which computes the latents for itself."""
        roles: dict[str, ShardRole] = {"q": "column", "kv_up": "column", "o": "row"}
        plan: dict[str, ShardRole] = {name: roles.get(name, "replicate") for name in self._weighted()}
        return {**plan, "core": "replicate"} if self.core.dropout else plan

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        roles: dict[str, ParameterRole] = {}
        for name, module in self._weighted().items():
            if isinstance(module, nn.Linear):
                roles[f"{name}.weight"] = "matrix"
            else:
                roles |= norm_roles(module, f"{name}.")
        return roles

    def active_parameters(self) -> int:
        """Weights of the projections."""
        return sum(module.weight.numel() for module in self._weighted().values() if isinstance(module, nn.Linear))

    def mixing_flops(self, seq_len: int) -> float:
        """Same as ``SequenceMixer.mixing_flops``; a head has the mean of its features of keys and of values."""
        size = (self.plain_dim + self.rotary_dim + self.value_dim) / 2
        return 12.0 * self.n_heads * size * min(seq_len, self.window or seq_len)

    def context_plan(self) -> list[str]:
        """Same as ``SequenceMixer.context_plan``."""
        return ["core"]

    def sites(self) -> dict[str, Site]:
        """Same as ``ObservableModule.sites``; ``latent`` is what the cache keeps, normed."""
        own = {
            "q": Site(module="q", dims=("sample", "position", "features")),
            "latent": Site(module="kv_norm", dims=("sample", "position", "latent_width")),
        }
        return own | core_sites() | output_sites(self.value_dim)

    def _queries(self, hidden: torch.Tensor, surroundings: BlockInputs) -> torch.Tensor:
        """``(B, H, S, plain_dim + rotary_dim)``."""
        if self.q_down is not None:
            hidden = self.q_norm(self.q_down(hidden))
        q = self.q(hidden).unflatten(-1, (-1, self.plain_dim + self.rotary_dim))
        plain, rotary = q.split((self.plain_dim, self.rotary_dim), dim=-1)
        q = torch.cat((plain, rotate(rotary, surroundings.cos, surroundings.sin)), dim=-1).transpose(1, 2)
        return q if self.logit_scale == 1 else q * self.logit_scale

    def _weighted(self) -> dict[str, nn.Module]:
        """What has parameters."""
        return {name: module for name, module in self.named_children() if name != "core"}
