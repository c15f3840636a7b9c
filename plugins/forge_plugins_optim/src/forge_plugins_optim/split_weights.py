"""fp32 weights as a bf16 weight, with which the model computes, and a tail of 16 bits that the optimizer keeps."""

from __future__ import annotations

import torch


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 values as the nearest bf16 values and int16 tails, from which ``joined`` makes every bit of them again.

    A value halfway between two bf16 ones goes to the one that is larger in magnitude, where a cast goes to the even
    one: a cast leads 65,537 fp32 values to an even bf16 one, one more than 16 bits can tell apart. Everything else is
    rounded as by a cast: what is nearer to 2¹²⁸ than to the largest bf16 value becomes infinite, and its tail knows
    better. Of NaN only that it is one is kept.
    """
    bits = torch.where(values == values, values, torch.nan).view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def joined(weights: torch.Tensor, tails: torch.Tensor) -> torch.Tensor:
    """The fp32 values of bf16 weights and their int16 tails, of which zeros are those of a weight that is itself."""
    return (weights.float().view(torch.int32) + tails.int()).view(torch.float32)
