"""Warm starts: a run that starts afresh begins with tensors of other runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from forge_core.config.sections import Job
    from forge_core.contracts.tokenizer import Tokenizer
    from forge_core.distributed.mesh import Mesh
    from forge_core.registry.catalog import Catalog
    from forge_core.train.build import BuiltModel

DEFAULT = "tensors"
"""The component that does what ``[checkpoint.load]`` asks for."""


class WarmStart(ABC):
    """Base class. All ranks have one, and call the same methods together."""

    @abstractmethod
    def choose(self) -> None:
        """Resolve ``job.checkpoint.loads``, before anything is built.

        Raises:
            ConfigError: there is no such source, or it has not what is asked for.
        """

    def look_at(self, tokenizer: Tokenizer | None) -> None:  # noqa: B027  # most need nothing
        """Called once the data are open, with their tokenizer, if they have one. Weights that know what tokens of
        another tokenizer mean can be told of, or refused. By default nothing is done.

        Raises:
            ConfigError: the weights are of no use with it.
        """

    @property
    @abstractmethod
    def sources(self) -> Sequence[Path]:
        """The checkpoints and folders that tensors are taken from."""

    @abstractmethod
    def load(self, model: BuiltModel, optimizer: torch.optim.Optimizer, mesh: Mesh) -> Mapping[str, Any]:
        """Read what was chosen into model and optimizer, which have their first values. Each rank reads its own part.

        Returns:
            JSON values for ``loaded.json``: the fate of every tensor.

        Raises:
            ConfigError: a tensor has another shape or dtype here; or nothing of what was chosen has a place.
        """


class WarmStartFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, job: Job, catalog: Catalog, say: Callable[[str], None]) -> WarmStart:
        """Build it for a run that starts afresh.

        Args:
            say: prints a line on rank 0.
        """
