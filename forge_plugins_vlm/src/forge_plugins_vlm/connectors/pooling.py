"""Connectors that make one token of several features: ``average_pool``, ``attention_pool`` and ``pixel_shuffle``.

Shapes: N = tiles, R × C = the grid of features, W = features of a window, M = tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_plugins_vlm.connectors.attention import MediaAttention
from forge_plugins_vlm.connectors.cells import as_cells, squares
from forge_plugins_vlm.connectors.pooling_config import AttentionPoolConfig, AveragePoolConfig, PixelShuffleConfig
from forge_plugins_vlm.connectors.projection import Projection, role_of
from forge_plugins_vlm.contracts.vision_encoder import Grid


class AveragePool(nn.Module):
    """The connector ``average_pool``."""

    def __init__(self, config: AveragePoolConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.window = config.window
        self.projection = Projection(*config.widths(in_dim, out_dim), activation=config.activation)

    def forward(self, features: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Same as ``Connector.forward``."""
        means = mean_of_windows(as_cells(features, grid), self.window)
        tokens: torch.Tensor = self.projection(means.flatten(1, 2))
        return tokens

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Connector.init_weights``."""
        self.projection.init_weights(rng, f"{prefix}projection.")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Connector.parameter_roles``."""
        return {name: role_of(name) for name, _ in self.named_parameters()}


class AttentionPool(nn.Module):
    """The connector ``attention_pool``."""

    def __init__(self, config: AttentionPoolConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.window = config.window
        self.attention = MediaAttention(in_dim, config.n_heads)
        self.projection = Projection(*config.widths(in_dim, out_dim), activation=config.activation)

    def forward(self, features: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Same as ``Connector.forward``."""
        cells = as_cells(features, grid)
        beyond = [-side % self.window for side in grid]
        windows = squares(F.pad(cells, (0, 0, 0, beyond[1], 0, beyond[0])), self.window)
        queries = mean_of_windows(cells, self.window).flatten(1, 2)
        pooled = self.attention(queries.flatten(0, 1).unsqueeze(1), windows.flatten(0, 1), self._visible(cells, beyond))
        tokens: torch.Tensor = self.projection(pooled.view_as(queries))
        return tokens

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Connector.init_weights``."""
        self.attention.init_weights(rng, f"{prefix}attention.")
        self.projection.init_weights(rng, f"{prefix}projection.")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Connector.parameter_roles``."""
        return {name: role_of(name) for name, _ in self.named_parameters()}

    def _visible(self, cells: torch.Tensor, beyond: list[int]) -> torch.Tensor | None:
        """``(N · M, W)`` bool: features of windows that are there; ``None``: all are."""
        if not any(beyond):
            return None
        is_there = F.pad(torch.ones_like(cells[..., :1], dtype=torch.bool), (0, 0, 0, beyond[1], 0, beyond[0]))
        return squares(is_there, self.window).flatten(0, 1).squeeze(-1)


class PixelShuffle(nn.Module):
    """The connector ``pixel_shuffle``."""

    def __init__(self, config: PixelShuffleConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.config = config
        widths = config.widths(in_dim * config.scale**2, out_dim)
        self.projection = Projection(*widths, bias=config.bias, activation=config.activation)

    def forward(self, features: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Same as ``Connector.forward``."""
        self.config.grid(grid)
        tokens: torch.Tensor = self.projection(squares(as_cells(features, grid), self.config.scale).flatten(2))
        return tokens

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Connector.init_weights``."""
        self.projection.init_weights(rng, f"{prefix}projection.")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Connector.parameter_roles``."""
        return {name: role_of(name) for name, _ in self.named_parameters()}


def mean_of_windows(cells: torch.Tensor, window: int) -> torch.Tensor:
    """``(N, R, C, D)`` to ``(N, ⌈R / window⌉, ⌈C / window⌉, D)``: means of what is there of each window."""
    pooled = F.avg_pool2d(cells.permute(0, 3, 1, 2), window, ceil_mode=True, count_include_pad=False)
    return pooled.permute(0, 2, 3, 1)
