"""The projection that every connector ends with."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_plugins_dense.activation import FUNCTIONS
from forge_plugins_vlm.connectors.projection_config import Activation
from forge_plugins_vlm.initial_values import init_layer


class Projection(nn.Module):
    """Linear layers with an activation between them.

    Args:
        widths: of the input, of each hidden layer and of the output.
        bias: of each layer.
        activation: its name.
    """

    def __init__(self, *widths: int, bias: bool = True, activation: Activation = "gelu") -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(nn.Linear(before, after, bias=bias) for before, after in pairwise(widths))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, in)`` to ``(…, out)``."""
        for number, layer in enumerate(self.layers):
            hidden = layer(FUNCTIONS[self.activation](hidden) if number else hidden)
        return hidden

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Connector.init_weights``."""
        for number, layer in enumerate(self.layers):
            init_layer(layer, rng, f"{prefix}layers.{number}.")  # type: ignore[arg-type]  # a ModuleList forgets


def role_of(name: str) -> ParameterRole:
    """The role of a parameter by its name: a norm has ``norm`` in the name of its module, and all else is a matrix with
    its bias."""
    if name.endswith("bias"):
        return "bias"
    return "norm" if "norm" in name.split(".")[-2] else "matrix"
