"""What can be set for the encoder ``concatenated``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import attrs

from forge_core.api import ComponentRef, Slot
from forge_plugins_vlm.contracts.vision_encoder import Grid, VisionEncoderConfig

if TYPE_CHECKING:
    from forge_core.config.sections import Job


def _several(_: object, __: object, value: tuple[Part, ...]) -> None:
    if len(value) < 2:
        raise ValueError(f"must have at least two encoders, got {len(value)}")


@attrs.frozen(kw_only=True)
class Part:
    """One of the encoders."""

    encoder: Annotated[ComponentRef, Slot("vision_encoder")]
    """Any encoder with its keys."""


@attrs.frozen(kw_only=True)
class ConcatenatedConfig(VisionEncoderConfig):
    """Several encoders that look at the same tiles, and whose features of a place stand side by side (Prismatic,
    Karamcheti et al. 2024, arXiv 2402.07865: DINOv2 and SigLIP). They have grids of the same size."""

    parts: tuple[Part, ...] = attrs.field(validator=_several)
    """Arrays of tables: ``[[model.encoder.parts]]``, each with ``encoder``."""

    @property
    def encoders(self) -> list[ComponentRef]:
        """The encoders, in order."""
        return [part.encoder for part in self.parts]

    @property
    def dim(self) -> int:
        """Same as ``VisionEncoderConfig.dim``: the sum of theirs."""
        return sum(use.config.dim for use in self.encoders)

    @property
    def tile_size(self) -> Grid | None:
        """Same as ``VisionEncoderConfig.tile_size``: that of the first that takes tiles of one size."""
        sizes = [use.config.tile_size for use in self.encoders]
        return next((size for size in sizes if size is not None), None)

    @property
    def usual_tile(self) -> Grid:
        """Same as ``VisionEncoderConfig.usual_tile``: that of the first."""
        usual: Grid = self.tile_size or self.encoders[0].config.usual_tile
        return usual

    @property
    def takes_padding(self) -> bool:
        """Same as ``VisionEncoderConfig.takes_padding``: all of them do."""
        return all(use.config.takes_padding for use in self.encoders)

    def grid(self, height: int, width: int) -> Grid:
        """Same as ``VisionEncoderConfig.grid``."""
        grids: list[Grid] = [use.config.grid(height, width) for use in self.encoders]
        for use, (rows, columns) in zip(self.encoders, grids, strict=True):
            if (rows, columns) != grids[0]:
                raise ValueError(
                    f"the encoders have grids of different size: {self.encoders[0].name} one of {grids[0][0]} × "
                    f"{grids[0][1]} features for a tile of {height} × {width} pixels, and {use.name} one of {rows} × "
                    f"{columns}"
                )
        return grids[0]

    @property
    def heads_to_cut(self) -> int:
        """Same as ``VisionEncoderConfig.heads_to_cut``: what divides those of all."""
        heads = [use.config.heads_to_cut for use in self.encoders]
        return math.gcd(*heads) if all(heads) else 0

    def flops(self, height: int, width: int) -> float:
        """Same as ``VisionEncoderConfig.flops``."""
        total: float = sum(use.config.flops(height, width) for use in self.encoders)
        return total

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Encoders that take tiles of different sizes, or have grids of different size."""
        if self.tile_size is not None:
            try:
                self.grid(*self.tile_size)
            except ValueError as error:
                yield "parts", str(error)
