"""Blockwise quantisation to 8 bits (Dettmers et al., 2022, https://arxiv.org/abs/2110.02861).

A block is 256 elements of the last dimension, counted from the start of the whole tensor, so that blocks are the same
however it is cut over ranks. It keeps the largest of its magnitudes in fp32, its scale, and each element as the code of
the nearest of 256 values between −1 and 1, or 0 and 1, times the scale.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn.functional import pad

BLOCK = 256
_DECADES = 7


class DynamicMap:
    """The 256 values of a code.

    Of magnitudes in (0.1, 1] there are 64 with a sign, 128 without one, as means of intervals of equal length; in each
    of the six decades below there are half as many; and 0 and 1. A magnitude in decade k, from ``10^−k`` down to
    ``10^−(k+1)``, is at most ``0.45 · 10^−k / 2^(6−k)`` from the nearest value with a sign, and half of that from the
    nearest one without: at most 0.0071 or 0.0036 of the scale for any element. Without a sign, what is above 0 is never
    rounded below the smallest value above 0, 3.25e-7.
    """

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        self.signed = signed
        self.values = torch.tensor(_values(signed), device=device)
        """Ascending, fp32."""
        self._midpoints = torch.cat([(self.values[1:] + self.values[:-1]) / 2, self.values.new_full((1,), torch.inf)])
        # The numbers that share the upper 16 bits of fp32 have at most one midpoint among them: a table of the code of
        # the lowest, and one comparison, find what a binary search in all midpoints does, in half its time.
        bits = torch.arange(2**16, dtype=torch.int32, device=device) << 16
        lowest = torch.where(bits < 0, bits | 0xFFFF, bits).view(torch.float32).nan_to_num(0.0)
        self._codes = torch.bucketize(lowest, self._midpoints[:-1]).to(torch.uint8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The code of the nearest value, uint8, of fp32 numbers from −1 to 1; halfway, of the smaller one."""
        flat = values.reshape(-1)
        codes = self._codes.index_select(0, (flat.view(torch.int32) >> 16) & 0xFFFF)
        codes += flat > self._midpoints.index_select(0, codes.int())
        return codes.view(values.shape)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The values of codes, fp32."""
        return self.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _values(signed: bool) -> list[float]:
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        n = 2 ** (_DECADES - 1 - decade + (not signed))
        means = [10.0**-decade * (0.1 + 0.9 * (i + 0.5) / n) for i in range(n)]
        values += [*means, *(-mean for mean in means if signed)]
    return sorted(values)


@attrs.frozen
class Blocks:
    """Where the elements of one rank are in the last dimension of a whole tensor."""

    length: int
    """Of the whole."""
    offset: int
    """Of this rank's first element."""
    held: int
    """The elements of this rank."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the whole."""
        return -(-self.length // BLOCK)

    def scales(self, values: torch.Tensor) -> torch.Tensor:
        """``(…, n_blocks)``: the largest magnitude of each block of the whole among the ``(…, held)`` elements of this
        rank; 0 for blocks of other ranks."""
        before, after = self.offset % BLOCK, -(self.offset + self.held) % BLOCK
        here = pad(values.abs(), (before, after)).unflatten(-1, (-1, BLOCK)).amax(-1)  # type: ignore[no-untyped-call]  # torch's
        first = self.offset // BLOCK
        return pad(here, (first, self.n_blocks - first - here.shape[-1]))

    def of_each(self, scales: torch.Tensor) -> torch.Tensor:
        """The scale of each element: ``(…, n_blocks)`` to ``(…, held)``."""
        first, last = self.offset // BLOCK, -(-(self.offset + self.held) // BLOCK)
        start = self.offset % BLOCK
        return scales[..., first:last].repeat_interleave(BLOCK, -1)[..., start : start + self.held]

    def quantised(self, values: torch.Tensor, scales: torch.Tensor, map_: DynamicMap) -> torch.Tensor:
        """Codes, uint8."""
        relative = values / self.of_each(scales).clamp(min=torch.finfo(torch.float32).tiny)
        codes = map_.encode(relative)
        return codes if map_.signed else torch.maximum(codes, (values > 0).to(torch.uint8))

    def dequantised(self, codes: torch.Tensor, scales: torch.Tensor, map_: DynamicMap) -> torch.Tensor:
        """Values, fp32."""
        return map_.decode(codes).mul_(self.of_each(scales))
