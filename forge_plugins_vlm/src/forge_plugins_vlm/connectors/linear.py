"""Connectors that look at one feature at a time: ``linear``, ``mlp`` and ``fused_mlp``."""

from __future__ import annotations

import torch

from forge_core.contracts.model import ParameterRole
from forge_plugins_vlm.connectors.linear_config import FusedMLPConfig, LinearConfig, MLPConnectorConfig
from forge_plugins_vlm.connectors.projection import Projection, role_of
from forge_plugins_vlm.contracts.vision_encoder import Grid


class _EachFeature(Projection):
    def forward(self, features: torch.Tensor, grid: Grid | None = None) -> torch.Tensor:
        """Same as ``Connector.forward``; the grid does not matter."""
        return super().forward(features)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Connector.parameter_roles``."""
        return {name: role_of(name) for name, _ in self.named_parameters()}


class LinearConnector(_EachFeature):
    """The connector ``linear``."""

    def __init__(self, config: LinearConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__(in_dim, out_dim)


class MLPConnector(_EachFeature):
    """The connector ``mlp``."""

    def __init__(self, config: MLPConnectorConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__(*config.widths(in_dim, out_dim), bias=config.bias, activation=config.activation)


class FusedMLP(_EachFeature):
    """The connector ``fused_mlp``."""

    def __init__(self, config: FusedMLPConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__(in_dim, 4 * in_dim, out_dim, out_dim, activation=config.activation)
