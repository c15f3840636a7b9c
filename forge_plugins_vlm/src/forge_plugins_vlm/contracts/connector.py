"""Connectors: from the features of a tile to what the decoder reads.

Shapes: N = tiles, T = features of a tile, M = tokens of a tile, D = width of the decoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from forge_plugins_vlm.contracts.vision_encoder import Grid

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.model import Initializer, ParameterRole

MOST_LAYERS = 1000
"""Of a connector: any number may have been typed, and each takes memory before its size is known."""


@attrs.frozen(kw_only=True)
class ConnectorConfig(ABC):
    """What is known of a connector before it is built. Config classes of connectors extend this one."""

    @abstractmethod
    def grid(self, features: Grid) -> Grid:
        """The grid of tokens of a tile with such a grid of features; one row, if its tokens have no places.

        Raises:
            ValueError: it takes no such grid; the message says which it takes.
        """

    def num_tokens(self, features: Grid) -> int:
        """M, the tokens that a tile with such a grid of features becomes."""
        rows, columns = self.grid(features)
        return rows * columns

    @property
    def takes_padding(self) -> bool:
        """Whether a picture at the upper left of a tile has the tokens at the upper left of the grid. What stands for
        all of a tile has no such tokens."""
        return True

    def flops(self, features: Grid, in_dim: int, out_dim: int) -> float:
        """FLOPs of the forward of one tile: 2 a weight that is multiplied, and those of attention. ``forge plan``, the
        cut of a pipeline and MFU count with it.

        Args:
            features: rows and columns of them.
            in_dim: their width.
            out_dim: D.
        """
        return 0.0


def matrix_flops(*widths: int) -> float:
    """Of the forward of one position through matrices, from each width to the next: 2 a weight."""
    return 2.0 * sum(before * after for before, after in pairwise(widths))


class Connector(Protocol):
    """An ``nn.Module``, built on meta as all of a model is."""

    def forward(self, features: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Connect.

        Args:
            features: ``(N, T, in_dim)``, row by row.
            grid: their rows and columns, ``T`` in all.

        Returns:
            ``(N, M, out_dim)``, row by row, ``M = config.num_tokens(grid)``.
        """
        ...

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill every parameter and buffer; ``prefix`` is the qualified name of this module with a final dot."""
        ...

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        """The role of every parameter, by its name in this module."""
        ...


class ConnectorFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, in_dim: int, out_dim: int) -> Connector:
        """Build the connector on the current default device.

        Args:
            config: extends ``ConnectorConfig``.
            in_dim: width of the encoder's features.
            out_dim: D.
        """
        ...
