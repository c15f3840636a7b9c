"""The samples and positions of the forward that runs, by which the dimensions of a module's value get their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge_core.errors import ConfigError
from forge_plugins_interp.placement import Cut, whole_shape

BATCH = ("sample", "position")
"""The dimensions that a batch of tokens has, and that the value of a module must begin with."""


class BatchShape:
    """Sees how many samples and positions a part of a model is given.

    Args:
        part: of the model.
        cuts: how what it is given lies over ranks.
    """

    def __init__(self, part: nn.Module, cuts: Sequence[Cut]) -> None:
        self._part, self._cuts = part, cuts
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
        """The names of the dimensions of a module's value: ``sample``, ``position``, and ``features`` for one more, or
        ``dim_2``, ``dim_3``, … for several.

        Args:
            name: of the site.
            value: this rank's part.

        Raises:
            ConfigError: it does not begin with the samples and positions of the batch.
        """
        shape = whole_shape(value, cuts) if value.ndim >= len(BATCH) else tuple(value.shape)
        if shape[: len(BATCH)] != self._sizes:
            raise ConfigError(
                f"site {name}: a value that is read by the name of its module begins with samples and positions, "
                f"{_words(self._sizes)} here, and this one has the shape {_words(shape)}; the model must declare it"
            )
        further = value.ndim - len(BATCH)
        return BATCH + (("features",) if further == 1 else tuple(f"dim_{2 + number}" for number in range(further)))

    def _see(self, part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        self._sizes = whole_shape(first, self._cuts)[: len(BATCH)]


def _words(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes)) or "()"
