"""The encoder ``concatenated``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import ObservableModule, Site, within
from forge_core.errors import ConfigError
from forge_plugins_vlm.encoders.concatenated_config import ConcatenatedConfig


class Concatenated(nn.Module):
    """Encoders side by side.

    Raises:
        ConfigError: they take tiles of different sizes, or have grids of different size.
    """

    def __init__(self, config: ConcatenatedConfig, *, build: Builder) -> None:
        super().__init__()
        self.config = config
        if config.tile_size is not None:
            try:
                config.grid(*config.tile_size)
            except ValueError as error:
                raise ConfigError(f"model.encoder.parts: {error}") from error
        self.encoders = nn.ModuleList(build(use) for use in config.encoders)

    def forward(self, pixels: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Same as ``VisionEncoder.forward``."""
        self.config.grid(*pixels.shape[-2:])
        return torch.cat([encoder(pixels, sizes) for encoder in self.encoders], dim=-1)

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``VisionEncoder.init_weights``."""
        for name, encoder in self._named():
            encoder.init_weights(rng, prefix + name)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``VisionEncoder.parameter_roles``."""
        return {name + key: role for name, encoder in self._named() for key, role in encoder.parameter_roles().items()}

    def units(self) -> list[str]:
        """Same as ``VisionEncoder.units``."""
        return [name + unit for name, encoder in self._named() for unit in encoder.units()]

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``VisionEncoder.parallel_plan``."""
        return {name + key: role for name, encoder in self._named() for key, role in encoder.parallel_plan().items()}

    def sites(self) -> dict[str, Site]:
        """Same as ``VisionEncoder.sites``, of the encoders that have some."""
        return {
            name + key: within(name.rstrip("."), site)
            for name, encoder in self._named()
            if isinstance(encoder, ObservableModule)
            for key, site in encoder.sites().items()
        }

    def _named(self) -> list[tuple[str, Any]]:
        return [(f"encoders.{number}.", encoder) for number, encoder in enumerate(self.encoders)]
