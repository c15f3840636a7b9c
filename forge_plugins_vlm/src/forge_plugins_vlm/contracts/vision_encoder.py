"""Vision encoders: from tiles of pixels to features.

Shapes: N = tiles, H × W = pixels of a tile, T = features of a tile, R × C = rows and columns of its grid of features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from forge_core.errors import PluginError

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.builder import Builder
    from forge_core.contracts.model import Initializer, ParameterRole

Grid = tuple[int, int]
"""Rows and columns."""


@attrs.frozen(kw_only=True)
class VisionEncoderConfig(ABC):
    """What is known of an encoder before it is built. Config classes of encoders extend this one."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Width of a feature."""

    @property
    @abstractmethod
    def tile_size(self) -> Grid | None:
        """Height and width in pixels of the tiles that it takes; ``None`` for any that ``grid`` accepts."""

    @property
    def usual_tile(self) -> Grid:
        """Height and width of a tile that it takes: FLOPs are counted for it, and a blank one stands for no image. By
        default ``tile_size``.

        Raises:
            PluginError: it takes tiles of any size, and does not say which one is usual.
        """
        if self.tile_size is None:
            raise PluginError(
                f"{type(self).__qualname__} takes tiles of any size, and must have usual_tile: height and width of one"
            )
        return self.tile_size

    @abstractmethod
    def grid(self, height: int, width: int) -> Grid:
        """The grid of features of a tile of ``height`` × ``width`` pixels.

        Raises:
            ValueError: it takes no such tiles; the message says which it takes.
        """

    @property
    def takes_padding(self) -> bool:
        """Whether its forward takes ``sizes``. Without, it refuses them with a ``ValueError``."""
        return False

    @property
    def heads_to_cut(self) -> int:
        """Heads of attention of its layers, if these can be cut over ranks (``VisionEncoder.parallel_plan``): a number
        that the ranks must divide. 0: they cannot."""
        return 0

    def flops(self, height: int, width: int) -> float:
        """FLOPs of the forward of one tile: 2 a weight that is multiplied, and ``4 · layers · D · T²`` for attention.
        ``forge plan``, the cut of a pipeline and MFU count with it."""
        return 0.0


class VisionEncoder(Protocol):
    """An ``nn.Module``, built on meta as all of a model is.

    It may have a method ``parallel_plan() -> Mapping[str, ShardRole]``: the roles ``column`` and ``row`` of modules in
    its layers, by their names in this module. Each rank along ``tp`` then has some of the heads and of the hidden
    features between them, and what it reads and gives stays whole; ``config.heads_to_cut`` says how many heads.

    It may have ``sites() -> Mapping[str, Site]``, as ``ObservableModule`` has it: tensors of its layers that can be
    looked at, by names in this module such as ``layers.3.resid_post``, with dimensions that begin with ``"tile"``.
    """

    def forward(self, pixels: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Encode tiles.

        Args:
            pixels: ``(N, 3, H, W)`` uint8, RGB. The encoder normalises them by its own mean and deviation.
            sizes: ``(N, 2)`` int64, height and width of the part of each tile that is the picture, at the upper left;
                the rest is padding, which no feature of the picture depends on. ``None``: there is no padding.

        Returns:
            ``(N, R · C, dim)``, row by row, in the dtype of its weights.
        """
        ...

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill every parameter and buffer, with values of a file or random ones; ``prefix`` is the qualified name of
        this module with a final dot."""
        ...

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        """The role of every parameter, by its name in this module."""
        ...

    def units(self) -> Sequence[str]:
        """The names of its repeated layers, which are gathered, recomputed and compiled on their own. Each is called
        with hidden states as its first positional argument, and gives hidden states."""
        ...


class VisionEncoderFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, build: Builder) -> VisionEncoder:
        """Build the encoder on the current default device.

        Args:
            config: extends ``VisionEncoderConfig``.
            build: builds encoders within this one. A factory may do without it.
        """
        ...
