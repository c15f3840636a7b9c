"""Rounding to bf16 up or down by chance, so that what is added up is right on average."""

from __future__ import annotations

import hashlib

import torch

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
