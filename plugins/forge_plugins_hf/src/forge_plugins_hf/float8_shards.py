"""Weights in float8 with factors for blocks, read as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from forge_core.errors import ConfigError, and_more
from forge_plugins_hf.quantisation import Float8Blocks
from forge_plugins_hf.shards import Shards

FACTORS = "_scale_inv"
"""The end of the name of a tensor with the factors of another one."""
_FLOAT8 = "F8_E4M3"


def open_shards(folder: Path, blocks: Float8Blocks | None, dtype: torch.dtype) -> Shards:
    """The weights in a folder.

    Args:
        blocks: how weights are stored, if not as they are.
        dtype: to which products of float8 weights and factors are rounded.

    Raises:
        ConfigError: as ``Shards``; or weights are in float8 and nothing says by which factors.
    """
    if blocks is not None:
        return Float8Shards(folder, blocks, dtype)
    shards = Shards(folder)
    if found := [name for name in shards.names if shards.dtype(name).startswith("F8_")]:
        raise ConfigError(
            f"{folder}: {', '.join(found[:5])}{and_more(len(found), 5)} in float8, and config.json has no "
            "quantization_config with quant_method = 'fp8', which would say how they are scaled"
        )
    return shards


class Float8Shards(Shards):
    """A weight ``W`` and its factors ``W_scale_inv``, one for each block of it, are one tensor: their product.

    Raises:
        ConfigError: as ``Shards``; or factors are missing, or not as many as there are blocks.
    """

    def __init__(self, folder: Path, blocks: Float8Blocks, dtype: torch.dtype) -> None:
        super().__init__(folder)
        self._blocks, self._dtype = blocks, dtype
        self._scaled = {name for name in self._stored if self.dtype(name).startswith("F8_") and not _is_factors(name)}
        if wrong := [problem for name in sorted(self._scaled) if (problem := self._problem(name))]:
            raise ConfigError(f"{folder}: {'; '.join(wrong[:5])}{and_more(len(wrong), 5, '; ')}")

    @property
    def names(self) -> list[str]:
        """The names of all tensors but factors."""
        return [name for name in self._stored if name.removesuffix(FACTORS) not in self._scaled or name in self._scaled]

    def read(self, name: str, part: Sequence[slice] | None = None) -> torch.Tensor:
        """Same as ``Shards.read``; of factors, those of the part are read. The product is taken in fp32."""
        if name not in self._scaled:
            return super().read(name, part)
        whole = [slice(0, size) for size in self.shape(name)]
        rows, columns = whole if part is None else [*part, *whole[len(part) :]]
        high, wide = self._blocks.rows, self._blocks.columns
        covering = (
            slice(rows.start // high, -(-rows.stop // high)),
            slice(columns.start // wide, -(-columns.stop // wide)),
        )
        weight, factors = super().read(name, (rows, columns)), super().read(name + FACTORS, covering).float()
        begin = columns.start - covering[1].start * wide
        made = torch.empty(weight.shape, dtype=self._dtype)
        for number, factor in enumerate(factors, start=covering[0].start):  # a row of blocks at a time
            here = slice(max(number * high - rows.start, 0), (number + 1) * high - rows.start)
            along = factor.repeat_interleave(wide)[begin : begin + weight.shape[1]]
            made[here] = weight[here].float() * along
        return made

    def _problem(self, name: str) -> str:
        if self.dtype(name) != _FLOAT8:
            return f"{name} is in {self.dtype(name)}, and {_FLOAT8} is read"
        if len(self.shape(name)) != 2:
            return f"{name} has the shape {tuple(self.shape(name))}, and matrices alone are read in float8"
        if name + FACTORS not in self._stored:
            return f"{name} is in float8, and {name + FACTORS} is missing"
        rows, columns = self.shape(name)
        expected = -(-rows // self._blocks.rows), -(-columns // self._blocks.columns)
        found = tuple(self.shape(name + FACTORS))
        if found != expected:
            return f"{name + FACTORS} has the shape {found}, and {name} has {expected[0]} × {expected[1]} blocks"
        return ""


def _is_factors(name: str) -> bool:
    """Factors may be in float8 themselves, as powers of two."""
    return name.endswith(FACTORS)
