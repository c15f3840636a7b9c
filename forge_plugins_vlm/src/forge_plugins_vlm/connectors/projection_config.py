"""What can be set for connectors that end with several matrices."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs.validators import and_, ge, gt, le, optional

from forge_plugins_vlm.contracts.connector import MOST_LAYERS, ConnectorConfig

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


def _between_matrices(config: ProjectionConfig, attribute: attrs.Attribute[Any], value: object) -> None:
    if value != attribute.default and config.n_layers == 1:
        raise ValueError(f"has no effect with n_layers = 1, got {value!r}; remove it, or set n_layers = 2")


@attrs.frozen(kw_only=True)
class ProjectionConfig(ConnectorConfig):
    """Matrices to the decoder's width, with an activation between them."""

    n_layers: int = attrs.field(default=2, validator=and_(ge(1), le(MOST_LAYERS)))
    """Matrices of the projection to the decoder's width."""
    hidden_dim: int | None = attrs.field(default=None, validator=[optional(gt(0)), _between_matrices])
    """Width between these matrices; by default the decoder's."""
    activation: Activation = attrs.field(default="gelu", validator=_between_matrices)
    """What stands between them; ``gelu`` is exact, ``gelu_tanh`` its approximation."""

    def widths(self, in_dim: int, out_dim: int) -> list[int]:
        """Of the input, between the matrices, and of the output."""
        return [in_dim, *[self.hidden_dim or out_dim] * (self.n_layers - 1), out_dim]
