"""The sites of a model with their shapes, and how each layout would cut them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from forge_core.api import PassComponent
from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog
from forge_plugins_interp.session import Session, inputs_of, needed_entries, read_batch
from forge_plugins_interp.sites import PassLayout, PlacedSite, dim_of, hidden_by, lies

_SAMPLES, _POSITIONS = 3, 8
"""Of the batch by which shapes are found; no size of a model is likely to be both."""


@attrs.frozen
class SiteRow:
    """One site."""

    name: str
    site: Site
    sizes: Sequence[int]
    dtype: torch.dtype
    by_axis: Mapping[str, str]
    """The dimension that each axis of a layout cuts, or why it hides the site."""

    def shape(self) -> str:
        """Such as ``B × S × 192``."""
        symbols = {"sample": "B", "position": "S", "key": "S"}
        return " × ".join(symbols.get(dim, str(size)) for dim, size in zip(self.site.dims, self.sizes, strict=True))

    def cuts(self) -> str:
        """Such as ``tp: head, cp: position``."""
        return ", ".join(f"{axis}: {dim}" for axis, dim in self.by_axis.items())


def site_rows(session: Session, catalog: Catalog, patterns: Sequence[str]) -> list[SiteRow]:
    """The sites that the patterns mean, or all. The model runs once, on a few tokens, to find shapes.

    Args:
        session: on one process.
        catalog: its passes of the phase ``shard`` say how they would cut.
    """
    tokens, inputs = _inputs(session)
    chosen = session.sites.chosen(patterns or [name for name, one in session.sites.here.items() if not one.hidden])
    with session.observe(*(placed.name for placed in chosen)) as seen, torch.no_grad():
        session.model(tokens, **inputs)
    layouts = _layouts(session, catalog)
    rows = []
    for placed in chosen:
        value = seen[placed.name]
        by_axis = {axis: _dim(placed, layout) for axis, layout in layouts.items()}
        by_axis = {axis: dim for axis, dim in by_axis.items() if dim}
        rows.append(SiteRow(placed.name, placed.site, tuple(value.shape), value.dtype, by_axis))
    return rows


def _inputs(session: Session) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Some tokens; or samples of what the run holds out, of a model that does not read tokens alone."""
    if not needed_entries(session.built.parts[0]):
        return torch.zeros(_SAMPLES, _POSITIONS, dtype=torch.int64), {}
    source = session.open_data()
    batch = read_batch(source, np.zeros(_SAMPLES, np.int64))
    return batch["tokens"], inputs_of(source, batch)


def _layouts(session: Session, catalog: Catalog) -> dict[str, PassLayout]:
    """How the installed pass that serves an axis lays out this model, by axis."""
    build = ComponentBuilder(catalog)
    found = {}
    for entry in catalog.components("parallel_pass"):
        component = entry.component
        if isinstance(component, PassComponent) and component.phase == "shard" and component.serves:
            one = build(build.resolve("parallel_pass", entry.qualified_name))
            if hasattr(one, "layout"):
                (axis,) = component.serves
                found[axis] = PassLayout(component.name, component.serves, [one.layout(session.built.parts[0])])
    return found


def _dim(placed: PlacedSite, layout: PassLayout) -> str:
    site = placed.site
    try:
        if placed.batch is not None:
            layout.refuse_unsaid(placed.name, site)
    except ConfigError:
        return "hidden"
    if hidden_by(site, [layout.ends]):
        return "hidden"
    parts, _ = lies(site, [layout.ends])
    dims = {dim % len(site.dims) for part in parts if (dim := dim_of(site, part)) is not None}
    return ", ".join(site.dims[dim] for dim in sorted(dims))
