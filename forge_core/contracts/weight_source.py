"""Weight sources: folders that are no checkpoints of Forge, and whose weights a run may begin with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.component_ref import ComponentRef
    from forge_core.registry.catalog import Catalog


class SourceWeights(Protocol):
    """The weights in a folder, by the names that parameters and buffers have in a model of this job."""

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """The whole shape of each."""

    def read(self, name: str, part: Sequence[slice]) -> torch.Tensor:
        """A part of one, on the CPU and in the dtype of the file. Each rank asks for its own parts.

        Args:
            part: a slice for each dimension.

        Raises:
            ConfigError: the file cannot be read.
        """


class WeightSource(ABC):
    """Base class. ``[checkpoint.load] path`` is opened by the first installed source that recognises it."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether this is a folder of its format. It must not raise. Rank 0 calls it."""

    @abstractmethod
    def open(self, path: Path, model: ComponentRef, catalog: Catalog, say: Callable[[str], None]) -> SourceWeights:
        """Open the folder, without reading tensors. All ranks call it.

        Args:
            model: the job's model, with its config.
            catalog: the installed components.
            say: prints a line on rank 0, for what differs and is allowed to.

        Raises:
            ConfigError: the folder is not whole, or holds another model.
        """


class WeightSourceFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /) -> WeightSource:
        """Build the source."""
