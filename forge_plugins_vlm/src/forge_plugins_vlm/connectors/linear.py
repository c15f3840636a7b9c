"""Connectors that look at one feature at a time: ``linear`` and ``mlp``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_plugins_vlm.connectors.linear_config import LinearConfig, MLPConnectorConfig
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.initial_values import init_layer


class Layers(nn.Module):
    """Linear layers with exact GELU between them.

    Args:
        widths: of the input, of each hidden layer and of the output.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, features: torch.Tensor, grid: Grid | None = None) -> torch.Tensor:
        """``(…, in)`` to ``(…, out)``; the same for any grid."""
        hidden = features
        for number, layer in enumerate(self.layers):
            hidden = layer(F.gelu(hidden) if number else hidden)
        return hidden

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Connector.init_weights``."""
        for number, layer in enumerate(self._all()):
            init_layer(layer, rng, f"{prefix}layers.{number}.")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``Connector.parameter_roles``."""
        return {name: "bias" if name.endswith("bias") else "matrix" for name, _ in self.named_parameters()}

    def _all(self) -> Sequence[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]


class LinearConnector(Layers):
    """The connector ``linear``."""

    def __init__(self, config: LinearConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__(in_dim, out_dim)


class MLPConnector(Layers):
    """The connector ``mlp``."""

    def __init__(self, config: MLPConnectorConfig, *, in_dim: int, out_dim: int) -> None:
        super().__init__(in_dim, *[out_dim] * config.n_layers)
