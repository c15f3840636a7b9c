"""Values of a model in float64, in which sums over many of them are exact enough."""

from __future__ import annotations

import torch


def wide(value: torch.Tensor) -> torch.Tensor:
    """Return the values in float64, without a gradient: on their device, or on the CPU where MPS has no float64."""
    value = value.detach()
    return (value.cpu() if value.device.type == "mps" else value).double()
