"""What can be set for the connector ``resampler``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
from attrs.validators import and_, ge, gt, le

from forge_plugins_vlm.connectors.head_count import uneven_heads
from forge_plugins_vlm.connectors.projection_config import Activation
from forge_plugins_vlm.contracts.connector import MOST_LAYERS, ConnectorConfig, matrix_flops
from forge_plugins_vlm.contracts.vision_encoder import Grid

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class ResamplerConfig(ConnectorConfig):
    """As many tokens for any tile: learned queries that attend to the features and to one another (the perceiver
    resampler of Flamingo, Alayrac et al. 2022, arXiv 2204.14198)."""

    n_tokens: int = attrs.field(default=64, validator=gt(0))
    """Tokens of a tile."""
    depth: int = attrs.field(default=2, validator=and_(ge(1), le(MOST_LAYERS)))
    """Layers of attention, each with an MLP; Flamingo has 6."""
    n_heads: int = attrs.field(default=4, validator=gt(0))
    """Heads of attention; they divide the width of the encoder's features."""
    mlp_ratio: int = attrs.field(default=4, validator=gt(0))
    """Width of the hidden layer of an MLP, in units of that width."""
    activation: Activation = "gelu"
    """That of the hidden layer; ``gelu`` is exact, ``gelu_tanh`` its approximation."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this connector in this job."""
        yield from uneven_heads(self.n_heads, job)

    def grid(self, features: Grid) -> Grid:
        """Same as ``ConnectorConfig.grid``: one row, as its tokens have no places."""
        return 1, self.n_tokens

    @property
    def takes_padding(self) -> bool:
        """Same as ``ConnectorConfig.takes_padding``."""
        return False

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """Same as ``ConnectorConfig.flops``."""
        media = features[0] * features[1] + self.n_tokens
        attention = 2 * (self.n_tokens + media) * matrix_flops(in_dim, in_dim) + 4.0 * in_dim * self.n_tokens * media
        mlp = self.n_tokens * matrix_flops(in_dim, self.mlp_ratio * in_dim, in_dim)
        return self.depth * (attention + mlp) + self.n_tokens * matrix_flops(in_dim, out_dim)
