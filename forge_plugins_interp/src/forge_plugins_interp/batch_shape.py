"""The samples and positions of the forward that runs, by which the dimensions of a module's value get their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from forge_core.errors import ConfigError
from forge_plugins_interp.placement import Cut, whole_shape

BATCH = ("sample", "position")
"""The dimensions that a batch of tokens has."""


class BatchShape:
    """Sees how many samples and positions a part of a model is given.

    Args:
        part: of the model.
        cuts: how what it is given lies over ranks.
        dims: the names of the first dimensions of the first tensor that it is given.
        needed: with so many of them the value of a module must begin.
    """

    def __init__(self, part: nn.Module, cuts: Sequence[Cut], dims: tuple[str, ...], needed: int) -> None:
        self._part, self._cuts, self._dims, self._needed = part, cuts, dims, needed
        self._sizes: tuple[int, ...] = ()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See the forwards that run until the context ends."""
        handle = self._part.register_forward_pre_hook(self._see, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def dims(self, name: str, value: torch.Tensor, cuts: Sequence[Cut]) -> tuple[str, ...]:
        """The names of the dimensions of a module's value: those of the batch that it has as many of, and then
        ``features`` for one more, or ``dim_2``, ``dim_3``, … by their number for several.

        Args:
            name: of the site.
            value: this rank's part.

        Raises:
            ConfigError: it does not begin with those of the batch.
        """
        shape = whole_shape(value, cuts) if value.ndim >= self._needed else tuple(value.shape)
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(shape, self._sizes, strict=False))
        known = len([*alike])
        if known < self._needed:
            begins = " and ".join(f"{dim}s" for dim in self._dims[: self._needed])
            raise ConfigError(
                f"site {name}: a value that is read by the name of its module begins with {begins}, "
                f"{_words(self._sizes)} here, and this one has the shape {_words(shape)}; the model must declare it"
            )
        further = [f"dim_{number}" for number in range(known, value.ndim)]
        return (*self._dims[:known], *(["features"] if len(further) == 1 else further))

    def _see(self, part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        self._sizes = whole_shape(first, self._cuts)[: len(self._dims)]


def _words(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes)) or "()"
