"""What can be set for connectors that make one token of several features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
from attrs.validators import and_, ge, gt, le

from forge_plugins_vlm.connectors.head_count import uneven_heads
from forge_plugins_vlm.connectors.projection_config import ProjectionConfig
from forge_plugins_vlm.contracts.connector import MOST_LAYERS, matrix_flops
from forge_plugins_vlm.contracts.vision_encoder import Grid

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class PoolConfig(ProjectionConfig):
    """A token for each window of features; windows at the right and at the bottom may have fewer."""

    window: int = attrs.field(default=2, validator=and_(ge(2), le(256)))
    """Rows and columns of features that become a token."""

    def grid(self, features: Grid) -> Grid:
        """Same as ``ConnectorConfig.grid``."""
        rows, columns = features
        return -(-rows // self.window), -(-columns // self.window)

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """Same as ``ConnectorConfig.flops``: of the projection."""
        return self.num_tokens(features) * matrix_flops(*self.widths(in_dim, out_dim))


@attrs.frozen(kw_only=True)
class AveragePoolConfig(PoolConfig):
    """The mean of the features in a window, projected."""


@attrs.frozen(kw_only=True)
class AttentionPoolConfig(PoolConfig):
    """Attention of a window's mean to its features, projected (Molmo, Deitke et al. 2024, arXiv 2409.17146)."""

    n_heads: int = attrs.field(default=4, validator=gt(0))
    """Heads of attention; they divide the width of the encoder's features."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this connector in this job."""
        yield from uneven_heads(self.n_heads, job)

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """Same as ``ConnectorConfig.flops``: windows at the edge count as whole ones."""
        media = self.window**2
        attention = 2 * (1 + media) * matrix_flops(in_dim, in_dim) + 4.0 * in_dim * media
        return self.num_tokens(features) * attention + super().flops(features, in_dim, out_dim)


@attrs.frozen(kw_only=True)
class PixelShuffleConfig(ProjectionConfig):
    """The features of a square side by side, projected; nothing is lost (Idefics3, Laurençon et al. 2024, arXiv
    2408.12637; nanoVLM)."""

    scale: int = attrs.field(default=2, validator=ge(2))
    """Rows and columns of features that become a token; both sides of the grid are multiples of it."""
    n_layers: int = attrs.field(default=1, validator=and_(ge(1), le(MOST_LAYERS)))
    """Matrices of the projection to the decoder's width."""
    bias: bool = True
    """Add a bias behind each matrix; Idefics3 does not."""

    def grid(self, features: Grid) -> Grid:
        """Same as ``ConnectorConfig.grid``."""
        rows, columns = features
        if rows % self.scale or columns % self.scale:
            raise ValueError(
                f"pixel_shuffle takes grids whose rows and columns are multiples of scale = {self.scale}, and not of "
                f"{rows} × {columns} features"
            )
        return rows // self.scale, columns // self.scale

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """Same as ``ConnectorConfig.flops``."""
        return self.num_tokens(features) * matrix_flops(*self.widths(in_dim * self.scale**2, out_dim))
