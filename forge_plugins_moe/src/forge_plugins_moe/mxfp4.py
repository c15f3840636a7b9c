"""Weights in MXFP4: blocks of 32 numbers of four bits, with a power of two each (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import torch

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1 without its sign, which is the highest of the four bits."""
_BIAS = 127


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers, ``(…, 32 · G)`` in bf16, which has all of them: none is rounded.

    Args:
        blocks: ``(…, G, 16)`` uint8, two numbers a byte, the one in the low bits first.
        scales: ``(…, G)`` uint8, the exponents and 127.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16, device=blocks.device)
    bits = blocks.to(torch.uint8)  # shapes are worked out without values, which then have no dtype of their own
    pairs = torch.stack((values[(bits & 15).int()], values[(bits >> 4).int()]), dim=-1)
    exponents = scales.to(torch.int32).sub(_BIAS)[..., None, None]
    return torch.ldexp(pairs, exponents).flatten(-3)
