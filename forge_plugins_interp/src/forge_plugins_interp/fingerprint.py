"""A few numbers of a tensor, by which two runs are compared without their tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from forge_plugins_interp.wide import wide


@attrs.frozen
class Fingerprint:
    """Of all samples of a step, or of a parameter. It does not depend on how ranks share them out."""

    shape: tuple[int, ...]
    """Without the samples."""
    count: float
    """Elements."""
    total: float
    squares: float
    largest: float
    """Absolute value."""
    projection: float
    """On a direction that follows from the name alone, summed over samples."""

    @classmethod
    def of(cls, name: str, value: torch.Tensor, sample_dim: int | None) -> Fingerprint:
        """
        Args:
            name: chooses the direction of the projection: a random vector for each dimension, multiplied.
            value: whole.
            sample_dim: where samples are, which are interchangeable; ``None`` for a parameter.
        """
        rows = wide(value)
        rows = rows[None] if sample_dim is None else rows.movedim(sample_dim, 0)
        projected = rows
        for dim in reversed(range(1, rows.ndim)):
            projected = projected @ _direction(f"{name}.{dim}", rows.shape[dim]).to(rows.device)
        statistics = torch.stack([rows.sum(), rows.square().sum(), rows.abs().max(), projected.sum()]).tolist()
        return cls(tuple(rows.shape[1:]), rows.numel(), *statistics)

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """That of the samples of both."""
        return Fingerprint(
            self.shape,
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.projection + other.projection,
        )

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shape": list(self.shape),
            "elements": int(self.count),
            "mean": self.total / self.count,
            "norm": math.sqrt(self.squares),
            "largest": self.largest,
            "projection": self.projection,
        }


def add_samples(to: dict[str, Fingerprint], name: str, value: torch.Tensor, sample_dim: int) -> None:
    """Add the fingerprint of some more samples to what is there by that name."""
    one = Fingerprint.of(name, value, sample_dim)
    to[name] = to[name] + one if name in to else one


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """How far two tables of fingerprints are from each other: the largest of the differences of mean, norm, largest
    value and projection, each in units of what it has for one of the two. Infinite for other shapes, or where one has
    a value that is not finite and the other has not."""
    if a["shape"] != b["shape"] or a["elements"] != b["elements"]:
        return math.inf
    numbers: Sequence[str] = ("mean", "norm", "largest", "projection")
    if not all(math.isfinite(one[key]) for one in (a, b) for key in numbers):
        return 0.0 if all(str(a[key]) == str(b[key]) for key in numbers) else math.inf
    norm, largest = max(a["norm"], b["norm"]), max(a["largest"], b["largest"])
    if norm == 0:
        return 0.0
    # the mean and the projection of noise are as large as norm / √elements and norm
    units = {"mean": norm / math.sqrt(a["elements"]), "norm": norm, "largest": largest, "projection": norm}
    return max(float(abs(a[key] - b[key]) / units[key]) for key in numbers)


def _direction(key: str, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(size, generator=generator, dtype=torch.float64)
