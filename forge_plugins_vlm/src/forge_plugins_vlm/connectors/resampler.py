"""The connector ``resampler``.

Shapes: N = tiles, T = features of a tile, M = tokens of a tile, D = width of the features.
"""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_plugins_dense.activation import FUNCTIONS
from forge_plugins_dense.initial_values import normal
from forge_plugins_dense.norm import init_norm
from forge_plugins_vlm.connectors.attention import MediaAttention
from forge_plugins_vlm.connectors.projection import Projection, role_of
from forge_plugins_vlm.connectors.resampler_config import ResamplerConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.initial_values import init_layer


class Resampler(nn.Module):
    """Learned queries, layers in which they attend to features, and a projection."""

    def __init__(self, config: ResamplerConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(config.n_tokens, in_dim))
        self.layers = nn.ModuleList(ResamplerLayer(config, in_dim) for _ in range(config.depth))
        self.norm = nn.LayerNorm(in_dim)
        self.projection = Projection(in_dim, out_dim)

    def forward(self, features: torch.Tensor, grid: Grid | None = None) -> torch.Tensor:
        """Same as ``Connector.forward``; the grid does not matter."""
        hidden = self.queries.expand(features.shape[0], -1, -1)
        for layer in self.layers:
            hidden = layer(hidden, features)
        tokens: torch.Tensor = self.projection(self.norm(hidden))
        return tokens

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Connector.init_weights``."""
        rng.fill(f"{prefix}queries", self.queries, normal(1.0))
        for number, layer in enumerate(self.layers):
            layer.init_weights(rng, f"{prefix}layers.{number}.")  # type: ignore[operator]  # a ModuleList forgets
        init_norm(self.norm, rng, f"{prefix}norm.")
        self.projection.init_weights(rng, f"{prefix}projection.")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Connector.parameter_roles``."""
        return {name: "embedding" if name == "queries" else role_of(name) for name, _ in self.named_parameters()}


class ResamplerLayer(nn.Module):
    """Attention of queries to features and queries, then an MLP, each added to the queries."""

    def __init__(self, config: ResamplerConfig, dim: int) -> None:
        super().__init__()
        self.query_norm, self.media_norm, self.mlp_norm = (nn.LayerNorm(dim) for _ in range(3))
        self.attention, self.activation = MediaAttention(dim, config.n_heads), config.activation
        self.up, self.down = nn.Linear(dim, config.mlp_ratio * dim), nn.Linear(config.mlp_ratio * dim, dim)

    def forward(self, hidden: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """``(N, M, D)`` to ``(N, M, D)``; features are ``(N, T, D)``."""
        queries = self.query_norm(hidden)
        media = torch.cat((self.media_norm(features), queries), dim=1)
        hidden = hidden + self.attention(queries, media)
        added: torch.Tensor = hidden + self.down(FUNCTIONS[self.activation](self.up(self.mlp_norm(hidden))))
        return added

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill every parameter."""
        for name in ("query_norm", "media_norm", "mlp_norm"):
            init_norm(getattr(self, name), rng, f"{prefix}{name}.")
        self.attention.init_weights(rng, f"{prefix}attention.")
        for name in ("up", "down"):
            init_layer(getattr(self, name), rng, f"{prefix}{name}.")
