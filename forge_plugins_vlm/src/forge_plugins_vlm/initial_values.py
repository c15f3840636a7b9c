"""Initial values that depend on a layer's width, so that a model of width 64 and one of 4,096 both train."""

from __future__ import annotations

import math

import torch
from torch import nn

from forge_core.contracts.model import Initializer
from forge_plugins_dense.initial_values import normal, zeros


def fan_in_std(weight: torch.Tensor) -> float:
    """``1 / √fan_in``, which keeps the variance of what a layer gives (LeCun et al. 1998, "Efficient BackProp").

    Args:
        weight: ``(out, in, …)``, of a linear layer or a convolution.
    """
    return 1 / math.sqrt(weight[0].numel())


def init_layer(layer: nn.Linear | nn.Conv2d, rng: Initializer, prefix: str) -> None:
    """Fill a layer: its weights by ``fan_in_std``, its bias with zeros; ``prefix`` ends with a dot."""
    rng.fill(f"{prefix}weight", layer.weight, normal(fan_in_std(layer.weight)))
    if layer.bias is not None:
        rng.fill(f"{prefix}bias", layer.bias, zeros)
