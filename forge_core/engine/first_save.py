"""What is looked at once after each start, before the first checkpoint: whether an optimizer's state can be found again
in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from forge_core.engine.ranks import on_all_ranks
from forge_core.errors import PluginError

_LISTED = 3
"""Names in a line; of more, the number is given."""
_TORCHS = frozenset({"defaults", "state", "param_groups", "found_inf"})
"""Attributes of every optimizer."""


class FirstSave:
    """All ranks call the same methods at the same steps.

    Args:
        words: names the optimizer in messages.
        parameters: this rank's, by name.
        say: prints a line on the first rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        words: str,
        parameters: Mapping[str, nn.Parameter],
        say: Callable[[str], None],
    ) -> None:
        self._optimizer = optimizer
        self._words = words
        self._parameters = parameters
        self._say = say
        self._updated: set[str] = set()
        self._is_done = False

    def note_updated(self, names: Collection[str]) -> None:
        """The parameters that had a gradient in an optimizer's step."""
        if not self._is_done and len(self._updated) < len(self._parameters):
            self._updated.update(names)

    def check(self) -> None:
        """Before the first checkpoint after an update.

        Raises:
            PluginError: there is state that a resumed run could not be given as it was.
        """
        if self._is_done or not _on_any_rank(self._updated):
            return
        self._is_done = True
        on_all_ranks(self._refuse_what_cannot_be_saved)
        self._tell_of_what_is_missing()

    def _refuse_what_cannot_be_saved(self) -> None:
        own = _digests([*self._plain_state()])
        for key, digest in own.items():
            if any(other.get(key, digest) != digest for other in self._gathered(own)):
                raise PluginError(
                    f"{self._words} keeps a plain tensor as {key} that differs between ranks; make it with "
                    "zeros_like(parameter), so that it is sharded as the parameter is. This is a bug in the optimizer."
                )

    def _plain_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, slot, value in self._tensors():
            parameter: Any = self._parameters[name]
            if not isinstance(value, DTensor):
                yield f"the state {slot!r} of {name}", value
            elif not isinstance(parameter, DTensor) or value.shape != parameter.shape:
                raise PluginError(self._sharded_otherwise(name, slot, value))
            elif value.placements != parameter.placements:
                raise PluginError(self._sharded_otherwise(name, slot, value))
