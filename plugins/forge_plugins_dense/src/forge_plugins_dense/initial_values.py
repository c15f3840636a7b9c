"""What tensors are filled with, for ``forge_core.contracts.model.Initializer.fill``."""

from __future__ import annotations

from collections.abc import Callable

import torch


def normal(std: float) -> Callable[[torch.Tensor, torch.Generator], object]:
    """Independent draws from N(0, std²)."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def ones(tensor: torch.Tensor, _: torch.Generator) -> object:
    """One everywhere."""
    return tensor.fill_(1.0)


def zeros(tensor: torch.Tensor, _: torch.Generator) -> object:
    """Zero everywhere."""
    return tensor.zero_()
