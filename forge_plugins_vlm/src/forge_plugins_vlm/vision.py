"""The part of a model that turns tiles of pixels into image tokens.

Shapes: B = batch, N = tiles of a row, M = tokens of a tile, D = width of the decoder, F = N · M, and one more where
rows of tiles end in a learned token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, canonical_name
from forge_core.errors import PluginError
from forge_plugins_dense.initial_values import normal
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid


class VisionTower(nn.Module):
    """An encoder and a connector, and the learned token that ends a row of tiles, where the model has one.

    An encoder that is not trained, never or in a phase, runs without gradients, keeps no activations, and stays in
    evaluation mode. If the connector is not trained either, no gradient comes to it.
    """

    def __init__(self, config: VisionLanguageConfig, build: Builder) -> None:
        super().__init__()
        self.encoder: Any = build(config.encoder)
        width = config.encoder.config.dim
        self.connector: Any = build(config.connector, in_dim=width, out_dim=config.dim)
        self.newline = nn.Parameter(torch.empty(config.dim)) if config.newline else None
        self._config = config
        self._encoder_config, self._connector_config = config.encoder.config, config.connector.config
        self._names = config.encoder.qualified_name, config.connector.qualified_name
        self._trains_encoder, self._trains_connector = not config.freeze_encoder, True
        if config.freeze_encoder:
            self.encoder.requires_grad_(False)

    def forward(
        self, pixels: torch.Tensor, tile_sizes: torch.Tensor | None = None, pixels_sizes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode and connect.

        Args:
            pixels: ``(B, N, 3, H, W)`` uint8.
            tile_sizes: ``(B, N, 2)`` int64, as in the batch.
            pixels_sizes: ``(B, 2)`` int64, as in the batch: rows have tiles of several sizes.

        Returns:
            ``(B, F, D)``. In rows of smaller tiles, zeros follow behind their tokens.

        Raises:
            PluginError: the encoder or the connector gives another number of features than its config says.
        """
        if pixels_sizes is None:
            tokens = self._of_one_size(pixels, tile_sizes)
        else:
            tokens = self._of_several_sizes(pixels, tile_sizes, pixels_sizes)
        if self.newline is None:
            return tokens
        end = self.newline.to(tokens.dtype).expand(len(tokens), 1, -1)
        return torch.cat((tokens, end), dim=1)

    def train(self, mode: bool = True) -> VisionTower:
        """Same as ``nn.Module.train``, but for an encoder that is not trained."""
        super().train(mode)
        if not self._trains_encoder:
            self.encoder.eval()
        return self

    def set_frozen(self, names: Collection[str]) -> None:
        """Same as ``FreezableModel.set_frozen``, with names in this module."""
        self._trains_encoder = self._trains("encoder", names)
        self._trains_connector = self._trains("connector", names)
        self.train(self.training)

    def units(self) -> Sequence[str]:
        """The repeated layers of the encoder, by their names in this module."""
        return [f"encoder.{name}" for name in self.encoder.units()]

    @property
    def trains_encoder(self) -> bool:
        """Whether the encoder is trained, in the phase that the run is in."""
        return self._trains_encoder

    @property
    def trains_connector(self) -> bool:
        """Whether the connector is trained, in the phase that the run is in."""
        return self._trains_connector

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        """Fill every parameter and buffer; ``prefix`` is the qualified name of this module with a final dot."""
        self.encoder.init_weights(rng, f"{prefix}encoder.")
        self.connector.init_weights(rng, f"{prefix}connector.")
        if self.newline is not None:
            rng.fill(f"{prefix}newline", self.newline, normal(std))

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """The role of every parameter, by its name in this module."""
        roles: dict[str, ParameterRole] = {} if self.newline is None else {"newline": "embedding"}
        for part in ("encoder", "connector"):
            roles |= {f"{part}.{name}": role for name, role in getattr(self, part).parameter_roles().items()}
        return roles

    def _of_several_sizes(
        self, pixels: torch.Tensor, tile_sizes: torch.Tensor | None, pixels_sizes: torch.Tensor
    ) -> torch.Tensor:
        """All rows are encoded in each size, so that all ranks do the same, and are what they are in their own one."""
        sizes = self._config.sizes_within(*pixels.shape[-2:])
        found = []
        for height, width in sizes:
            own = None
            if tile_sizes is not None:
                own = torch.stack((tile_sizes[..., 0].clamp(max=height), tile_sizes[..., 1].clamp(max=width)), dim=-1)
            found.append(self._of_one_size(pixels[..., :height, :width], own))
        tokens = found[0].new_zeros(len(pixels), max(one.shape[1] for one in found), found[0].shape[2])
        for size, one in zip(sizes, found, strict=True):
            filled = F.pad(one, (0, 0, 0, tokens.shape[1] - one.shape[1]))
            tokens = torch.where(of_size(pixels_sizes, size)[:, None, None], filled, tokens)
        return tokens

    def _of_one_size(self, pixels: torch.Tensor, tile_sizes: torch.Tensor | None) -> torch.Tensor:
        """``(B, N · M, D)``."""
        sizes = {} if tile_sizes is None else {"sizes": tile_sizes.flatten(0, 1)}
        grid = self._encoder_config.grid(*pixels.shape[-2:])
        with nullcontext() if self._trains_encoder else torch.no_grad():
            features = self.encoder(pixels.flatten(0, 1), **sizes)
        self._refuse_number(0, features.shape[1], grid[0] * grid[1])
        with nullcontext() if self._trains_encoder or self._trains_connector else torch.no_grad():
            tokens: torch.Tensor = self.connector(features, grid)
        self._refuse_number(1, tokens.shape[1], self._connector_config.num_tokens(grid))
        return tokens.view(*pixels.shape[:2], *tokens.shape[1:]).flatten(1, 2)

    def _trains(self, part: str, frozen: Collection[str]) -> bool:
        named = getattr(self, part).named_parameters()
        return any(one.requires_grad and canonical_name(f"{part}.{name}") not in frozen for name, one in named)

    def _refuse_number(self, part: int, found: int, said: int) -> None:
        if found != said:
            kind, what = (("vision_encoder", "features"), ("connector", "tokens"))[part]
            raise PluginError(
                f"the {kind} {self._names[part]} gives {found} {what} for a tile, and its config says {said}. "
                f"This is a bug in {self._names[part].partition(':')[0]}."
            )


def of_size(pixels_sizes: torch.Tensor, size: Grid) -> torch.Tensor:
    """Which rows have tiles of a size: ``(B, 2)`` to ``(B,)`` bool."""
    return (pixels_sizes[:, 0] == size[0]) & (pixels_sizes[:, 1] == size[1])
