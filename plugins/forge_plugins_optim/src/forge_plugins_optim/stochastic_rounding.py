"""Rounding to bf16 up or down by chance, so that what is added up is right on average."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.state_layout import offset_in

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Of splitmix64 (Steele et al., 2014), as signed numbers."""


def seed_of(name: str) -> int:
    """A number of 62 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def noise(positions: torch.Tensor, seed: int, step: torch.Tensor) -> torch.Tensor:
    """63 random bits for each element, int64, the same in any part of a tensor.

    Args:
        positions: of elements in the whole tensor, int64.
        step: a scalar; each has noise of its own. The host does not wait for it.
    """
    bits = _mixed(positions + _mixed(seed + step.long()))
    return bits & 0x7FFFFFFFFFFFFFFF


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


def rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16: up with the probability of what would be cut off. What bf16 can express stays as it is.

    Args:
        bits: int64, of which the lowest 16 decide.
    """
    added = values.view(torch.int32) + (bits & 0xFFFF).int()
    return (added & -0x10000).view(torch.float32).bfloat16()


def round_into(
    kept: Sequence[tuple[torch.Tensor, torch.Tensor]],
    parameter: torch.Tensor,
    seed: int,
    step: torch.Tensor,
    *,
    first: int = 0,
) -> None:
    """Write fp32 values into bf16 tensors, up or down by chance.

    Args:
        kept: pairs of a bf16 tensor of the shape of this rank's part of ``parameter``, and its new values. Three at
            most.
        first: of the three pairs of a step, the number of the first in ``kept``: each has chance of its own.
    """
    bits = noise(positions_in(parameter), seed, step)
    for index, (one, values) in enumerate(kept, first):
        one.copy_(rounded(values, bits >> (16 * index)))


def positions_in(parameter: torch.Tensor) -> torch.Tensor:
    """Of this rank's elements in the whole parameter, counted row by row."""
    local = local_tensor(parameter)
    positions = torch.zeros(local.shape, dtype=torch.int64, device=local.device)
    stride = 1
    for dim in reversed(range(local.ndim)):
        first = offset_in(parameter, dim)
        along = torch.arange(first, first + local.shape[dim], device=local.device) * stride
        positions += along.view(-1, *[1] * (local.ndim - 1 - dim))
        stride *= parameter.shape[dim]
    return positions
