"""The encoder ``conv_vit``.

Shapes: N = tiles, H × W = pixels, R × C = the grid of features, T = R · C, D = width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import Site
from forge_plugins_dense.initial_values import normal
from forge_plugins_dense.norm import init_norm
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.encoders.conv_vit_config import ConvViTConfig
from forge_plugins_vlm.encoders.layer_sites import LayerParts
from forge_plugins_vlm.encoders.pixels import normalise, picture_cells
from forge_plugins_vlm.initial_values import init_layer

_MIDDLE = (0.5, 0.5, 0.5)
"""Mean and deviation that take pixels to −1 … 1."""
_PARTS = LayerParts(attention_norm="attention_norm", attention="o", mlp_norm="mlp_norm", mlp="down", mlp_output="down")


class ConvViT(nn.Module):
    """A convolutional stem, learned positions, and pre-norm transformer layers without causality."""

    def __init__(self, config: ConvViTConfig, **_: object) -> None:
        super().__init__()
        self.config = config
        channels = [3, *config.channels]
        self.stem = nn.ModuleList(
            nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1)
            for before, after in zip(channels, config.channels, strict=False)
        )
        self.projection = nn.Linear(config.dim, config.dim)
        rows, columns = (side // config.patch for side in config.size)
        self.positions = nn.Parameter(torch.empty(rows * columns, config.dim))
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, pixels: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Same as ``VisionEncoder.forward``; features of padding are 0."""
        grid = self.config.grid(*pixels.shape[-2:])
        cells = self._convolve(normalise(pixels, _MIDDLE, _MIDDLE, self.positions.dtype), sizes)
        hidden = self.projection(cells.flatten(2).transpose(1, 2)) + self._positions(grid)
        if sizes is None:
            for layer in self.layers:
                hidden = layer(hidden)
            return self._normed(hidden)
        is_picture = picture_cells(sizes, self.config.patch, *grid).flatten(1)
        # a tile without a picture sees itself, since attention to nothing is not a number
        visible = is_picture | ~is_picture.any(dim=1, keepdim=True)
        for layer in self.layers:
            hidden = layer(hidden, visible[:, None, None])
        return self._normed(hidden).masked_fill(~is_picture.unsqueeze(-1), 0)

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``VisionEncoder.init_weights``."""
        for number, convolution in enumerate(self.stem):
            init_layer(convolution, rng, f"{prefix}stem.{number}.")  # type: ignore[arg-type]  # a ModuleList forgets
        init_layer(self.projection, rng, f"{prefix}projection.")
        rng.fill(f"{prefix}positions", self.positions, normal(1 / math.sqrt(self.config.dim)))
        for number, layer in enumerate(self.layers):
            layer.init_weights(rng, f"{prefix}layers.{number}.")  # type: ignore[operator]  # the same
        init_norm(self.norm, rng, f"{prefix}norm.")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``VisionEncoder.parameter_roles``."""
        return {name: _role(name) for name, _ in self.named_parameters()}

    def units(self) -> list[str]:
        """Same as ``VisionEncoder.units``."""
        return [f"layers.{number}" for number in range(len(self.layers))]

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``VisionEncoder.parallel_plan``."""
        of_layer: dict[str, ShardRole] = {**dict.fromkeys(("q", "k", "v", "up"), "column"), "o": "row", "down": "row"}
        return {f"{unit}.{name}": role for unit in self.units() for name, role in of_layer.items()}

    def sites(self) -> dict[str, Site]:
        """Same as ``VisionEncoder.sites``."""
        return {name: site for unit in self.units() for name, site in _PARTS.sites(unit).items()}

    def _convolve(self, pictures: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
        """``(N, 3, H, W)`` to ``(N, D, R, C)``. Padding is 0 before each convolution, as the outside of a tile."""
        cell = 1
        hidden = pictures
        for convolution in self.stem:
            if sizes is not None:
                is_picture = picture_cells(sizes, cell, *hidden.shape[-2:])
                hidden = hidden.masked_fill(~is_picture.unsqueeze(1), 0)
            hidden = F.gelu(convolution(hidden))
            cell *= 2
        return hidden

    def _positions(self, grid: Grid) -> torch.Tensor:
        """``(T, D)``, interpolated where the grid is not the learned one."""
        rows, columns = (side // self.config.patch for side in self.config.size)
        if grid == (rows, columns):
            return self.positions
        learned = self.positions.T.view(1, -1, rows, columns)
        return F.interpolate(learned, size=grid, mode="bilinear").squeeze(0).flatten(1).T

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(hidden)
        return normed


class EncoderLayer(nn.Module):
    """A pre-norm layer: attention to all features, then an MLP (Dosovitskiy et al. 2021, arXiv 2010.11929)."""

    def __init__(self, config: ConvViTConfig) -> None:
        super().__init__()
        dim, hidden_dim = config.dim, config.dim * config.mlp_ratio
        self.head_size = dim // config.n_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.q, self.v, self.o = (nn.Linear(dim, dim) for _ in range(3))
        self.k = nn.Linear(dim, dim, bias=False)  # adds the same to all logits of a query, which a softmax drops
        self.mlp_norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """``(N, T, D)`` to ``(N, T, D)``.

        Args:
            visible: ``(N, 1, 1, T)`` bool, the features that all see; ``None``: every one.
        """
        normed = self.attention_norm(hidden)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        hidden = hidden + self.o(mixed.transpose(1, 2).flatten(2))
        added: torch.Tensor = hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))
        return added

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill every parameter."""
        for name in ("q", "k", "v", "o", "up", "down"):
            init_layer(getattr(self, name), rng, f"{prefix}{name}.")
        for name in ("attention_norm", "mlp_norm"):
            init_norm(getattr(self, name), rng, f"{prefix}{name}.")


def _role(name: str) -> ParameterRole:
    if name == "positions":
        return "embedding"
    if name.endswith("bias"):
        return "bias"
    return "norm" if "norm" in name else "matrix"
