"""The places of a site, and a change that patches each sample of a batch at one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import attrs
import torch

from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_interp.interventions import WholeIntervention
from forge_plugins_interp.sites import PlacedSite

Place = tuple[int, ...]
"""An index for each dimension by which places are distinguished."""
_TOGETHER = 16
"""Places that are patched in one forward, each in a copy of the prompt."""


def groups_of_places(placed: PlacedSite, value: torch.Tensor, by: Sequence[str]) -> Iterator[list[Place]]:
    """The places of a site, as many together as one forward patches. Without ``by``, the site is one place."""
    places = list(product(*(range(value.shape[placed.site.dims.index(dim)]) for dim in by)))
    for start in range(0, len(places), _TOGETHER):
        yield places[start : start + _TOGETHER]


@attrs.frozen(kw_only=True, eq=False)
class PatchPlaces(WholeIntervention):
    """Each sample of the batch is patched at a place of its own."""

    kind = "patch_places"
    source: torch.Tensor
    """``(1, …)``."""
    dims: Sequence[str]
    places: Sequence[Place]

    def apply(self, placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
        source = self.source.to(value.device, value.dtype)
        changed = value.clone()
        for row, place in enumerate(self.places):
            index = tuple(
                place[self.dims.index(dim)] if dim in self.dims else slice(None) for dim in placed.site.dims[1:]
            )
            changed[(row, *index)] = source[(0, *index)]
        return changed


def refuse_dims(placed: PlacedSite, by: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: the site has no samples, or lacks a dimension of ``by``.
    """
    dims = placed.site.dims
    if dims[0] != "sample":
        raise ConfigError(f"site {placed.name}: has the dimensions {', '.join(dims)}, and no samples first")
    for dim in by:
        if dim not in dims[1:]:
            hint = nearest_hint(dim, dims[1:])
            raise ConfigError(f"--by {dim}: site {placed.name} has the dimensions {', '.join(dims[1:])}{hint}")
