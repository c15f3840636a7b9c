"""The forwards of a model while it is changed: their number, and the tokens of the one that runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.interventions import WholeIntervention
from forge_plugins_interp.observation import Change
from forge_plugins_interp.placement import whole
from forge_plugins_interp.sites import PlacedSite


class Forwards:
    """Sees what a model is given.

    Args:
        given: its first argument, as a site.
    """

    def __init__(self, given: PlacedSite) -> None:
        self._given = given
        self._number = -1
        self._tokens: torch.Tensor | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count forwards from 0 until the context ends."""
        handle = self._given.module.register_forward_pre_hook(self._see, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def changed(self, change: WholeIntervention, placed: PlacedSite, make: Change, value: torch.Tensor) -> torch.Tensor:
        """The whole value with the change in it, in those forwards and at those tokens that it is for.

        Args:
            make: the change of this site, as ``WholeIntervention.placed_on`` gives it.

        Raises:
            ConfigError: the change is for some tokens, and the site has no positions, or the model reads no tokens.
        """
        if change.steps and self._number not in change.steps:
            return value
        changed = make(value)
        return torch.where(self._matches(change, placed), changed, value) if change.tokens else changed

    def _matches(self, change: WholeIntervention, placed: PlacedSite) -> torch.Tensor:
        """Where the tokens are those of the change, to be broadcast over the value."""
        dims = placed.site.dims
        if not {"sample", "position"} <= {*dims}:
            raise ConfigError(f"tokens: site {placed.name} has the dimensions {', '.join(dims)}, and no positions")
        if self._tokens is None:
            raise ConfigError(f"tokens: the model does not read tokens, by which site {placed.name} could be changed")
        found = torch.isin(self._tokens, torch.tensor(change.tokens, device=self._tokens.device))
        sizes = dict(zip(("sample", "position"), found.shape, strict=True))
        ordered = found if dims.index("sample") < dims.index("position") else found.T
        return ordered.reshape([sizes.get(dim, 1) for dim in dims])

    def _see(self, part: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._number += 1
        first = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        is_tokens = first.ndim == 2 and not first.is_floating_point()
        self._tokens = whole(first, self._given.cuts) if is_tokens else None
