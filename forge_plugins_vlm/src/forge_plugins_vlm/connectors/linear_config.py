"""What can be set for connectors that look at one feature at a time."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, le

from forge_plugins_vlm.connectors.projection_config import Activation, ProjectionConfig
from forge_plugins_vlm.contracts.connector import MOST_LAYERS, ConnectorConfig, matrix_flops
from forge_plugins_vlm.contracts.vision_encoder import Grid


@attrs.frozen(kw_only=True)
class EachFeatureConfig(ConnectorConfig):
    """A token for each feature."""

    def grid(self, features: Grid) -> Grid:
        """Same as ``ConnectorConfig.grid``: the features' own."""
        return features


@attrs.frozen(kw_only=True)
class LinearConfig(EachFeatureConfig):
    """One matrix with a bias; a token for each feature (LLaVA, Liu et al. 2023, arXiv 2304.08485)."""

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """Same as ``ConnectorConfig.flops``."""
        return self.num_tokens(features) * matrix_flops(in_dim, out_dim)


@attrs.frozen(kw_only=True)
class MLPConnectorConfig(ProjectionConfig, EachFeatureConfig):
    """Several matrices; a token for each feature (LLaVA-1.5, Liu et al. 2023, arXiv 2310.03744)."""

    n_layers: int = attrs.field(default=2, validator=and_(ge(2), le(MOST_LAYERS)))
    """Matrices; LLaVA calls 2 of them ``mlp2x_gelu``."""
    bias: bool = True
    """Add a bias behind each matrix."""

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """Same as ``ConnectorConfig.flops``."""
        return self.num_tokens(features) * matrix_flops(*self.widths(in_dim, out_dim))


@attrs.frozen(kw_only=True)
class FusedMLPConfig(EachFeatureConfig):
    """Three matrices, by way of four times the encoder's width; a token for each feature. Made for features of several
    encoders at once (Prismatic, Karamcheti et al. 2024, arXiv 2402.07865)."""

    activation: Activation = "gelu"
    """What stands between them; ``gelu`` is exact, ``gelu_tanh`` its approximation."""

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """Same as ``ConnectorConfig.flops``."""
        return self.num_tokens(features) * matrix_flops(in_dim, 4 * in_dim, out_dim, out_dim)
