"""State in checkpoints that earlier versions of a component have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs


@attrs.frozen(kw_only=True)
class StateChanges:
    """Changes of a module's parameters and persistent buffers; names are those within the module."""

    renamed: Mapping[str, str] = attrs.field(factory=dict)
    """The earlier name to the name of today. Shape and dtype are the same."""
    dropped: Sequence[str] = ()
    """Those of then that are not read."""
    added: Sequence[str] = ()
    """Those of now that keep their first values."""


class VersionedModule(Protocol):
    """The protocol of modules with versioned state, once its tensors are not named as they were."""

    state_version: int
    """Raised whenever the names or the meaning of its tensors change; a module without it has 1."""

    def load_state(self, version: int) -> StateChanges:
        """Called before a checkpoint is read whose module had another ``state_version``.

        Args:
            version: of then.

        Raises:
            Exception: it cannot be read. The run is refused, with the versions of then and now.
        """


class VersionedOptimizer(Protocol):
    """The protocol of optimizers with versioned state."""

    state_version: int
    """Raised whenever the names or the meaning of its state change; an optimizer without it has 1."""

    def load_state(self, version: int) -> None:
        """Called when ``self.state`` has been filled as another ``state_version`` had saved it: make it what ``step``
        needs, by parameter.

        Args:
            version: of then.

        Raises:
            Exception: it cannot. The run is refused, with the versions of then and now.
        """
