"""Activation patching: the corrupt prompt is run with some values of the clean one, place by place.

Meng et al. 2022 (arXiv 2202.05262), Wang et al. 2022 (arXiv 2211.00593); by gradients, Nanda 2023 and Syed et al. 2023
(arXiv 2310.10348).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Literal

import torch

from forge_plugins_interp.interventions import Replace
from forge_plugins_interp.patching.places import PatchPlaces, Place, groups_of_places, refuse_dims
from forge_plugins_interp.patching.prompts import Prompts, Span, refuse_pipeline
from forge_plugins_interp.placement import own_part, summed, whole
from forge_plugins_interp.session import Session
from forge_plugins_interp.sites import PlacedSite
from forge_plugins_interp.tidy_table import Row

Method = Literal["patching", "attribution", "integrated_gradients"]
_STEPS = 8
"""Points of the path of integrated gradients."""


def sweep(
    session: Session,
    prompts: Prompts,
    sites: Sequence[str],
    *,
    by: Sequence[str] = ("position",),
    method: Method = "patching",
) -> list[Row]:
    """How much of the clean prompt's answer each place brings back: 0 for nothing, 1 for all.

    ``(m(patched) − m(corrupt)) / (m(clean) − m(corrupt))``; with ``attribution``, ``m(patched) − m(corrupt)`` is taken
    as ``(a_clean − a_corrupt) · ∂m/∂a`` at the corrupt prompt; with ``integrated_gradients``, of the mean gradient on
    the path from corrupt to clean.

    Args:
        session: on one process, or on ranks without a pipeline.
        sites: names or patterns.
        by: dimensions of the sites of which each index is a place of its own, such as ``("position", "head")``.

    Returns:
        ``site``, the dimensions of ``by``, ``value`` (the metric) and ``effect``, a row a place.

    Raises:
        ConfigError: a site has no such dimension, or the prompts differ in nothing that the metric sees.
    """
    refuse_pipeline(session)
    chosen = session.sites.chosen(sites)
    names = [placed.name for placed in chosen]
    with torch.no_grad():
        with session.observe(*names) as clean:
            of_clean = float(prompts.measure(session, prompts.clean))
        for placed in chosen:
            refuse_dims(placed, by)
        with session.observe(*names) as corrupt:
            of_corrupt = float(prompts.measure(session, prompts.corrupt))
    span = Span(of_clean, of_corrupt)
    values = _METHODS[method](session, prompts, chosen, clean, corrupt, by)
    rows: list[Row] = []
    for placed in chosen:
        for place, change in values[placed.name].items():
            value = change if method == "patching" else of_corrupt + change
            at = dict(zip(by, place, strict=True))
            rows.append({"site": placed.name, **at, "value": value, "effect": span.effect(value)})
    return rows


Values = Mapping[str, torch.Tensor]


def _by_patching(
    session: Session, prompts: Prompts, chosen: Sequence[PlacedSite], clean: Values, corrupt: Values, by: Sequence[str]
) -> dict[str, dict[Place, float]]:
    """The metric of each place, patched."""
    found: dict[str, dict[Place, float]] = {}
    for placed in chosen:
        found[placed.name] = {}
        for places in groups_of_places(placed, clean[placed.name], by):
            change = PatchPlaces(placed.name, source=clean[placed.name], dims=by, places=places)
            with torch.no_grad(), session.intervene(change):
                measured = prompts.measure(session, prompts.corrupt.expand(len(places), -1))
            found[placed.name] |= dict(zip(places, measured.tolist(), strict=True))
    return found


def _by_attribution(
    session: Session, prompts: Prompts, chosen: Sequence[PlacedSite], clean: Values, corrupt: Values, by: Sequence[str]
) -> dict[str, dict[Place, float]]:
    gradients = {}
    if names := [placed.name for placed in chosen if not placed.site.compute]:
        with session.observe(*names, gradients=True) as seen:
            torch.autograd.backward(prompts.measure(session, prompts.corrupt).sum())
        gradients = {name: seen.grad(name) for name in names}
    for placed in chosen:
        if placed.site.compute:  # for whoever looks: the metric depends on what is put in its place
            gradients[placed.name] = _gradient_at(session, prompts, placed, corrupt[placed.name])
    ways = {name: _way(corrupt[name], clean[name]) for name in gradients}
    return {placed.name: _summed(placed, ways[placed.name] * gradients[placed.name], by) for placed in chosen}


def _by_integrated_gradients(
    session: Session, prompts: Prompts, chosen: Sequence[PlacedSite], clean: Values, corrupt: Values, by: Sequence[str]
) -> dict[str, dict[Place, float]]:
    found = {}
    for placed in chosen:
        start, way = corrupt[placed.name], _way(corrupt[placed.name], clean[placed.name])
        points = (start + (number + 0.5) / _STEPS * way for number in range(_STEPS))
        total = torch.stack([_gradient_at(session, prompts, placed, point) for point in points]).sum(0)
        found[placed.name] = _summed(placed, way * total / _STEPS, by)
    return found


def _way(corrupt: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """From the corrupt value to the clean one; 0 where both are −∞, as scores are that a mask hides."""
    return torch.where(clean == corrupt, 0, clean - corrupt)


def _gradient_at(session: Session, prompts: Prompts, placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
    """That of the metric of the corrupt prompt, by the value of a site, where the site has this one."""
    point = value.clone().requires_grad_()
    with session.intervene(Replace(placed.name, value=point)):
        torch.autograd.backward(prompts.measure(session, prompts.corrupt).sum())
    assert point.grad is not None, "the metric depends on it"
    part = own_part(point.grad, placed.cuts)  # of what this rank has put in
    for parameter in session.built.parameters.values():
        parameter.grad = None
    return whole(summed(part, placed.sums), placed.cuts) / session.context.mesh.degrees["cp"]


_METHODS: Mapping[Method, Callable[..., dict[str, dict[Place, float]]]] = {
    "patching": _by_patching,
    "attribution": _by_attribution,
    "integrated_gradients": _by_integrated_gradients,
}


def _summed(placed: PlacedSite, product_: torch.Tensor, by: Sequence[str]) -> dict[Place, float]:
    """The sum over what is no place of its own."""
    dims = placed.site.dims
    others = [number for number, dim in enumerate(dims) if dim not in by]
    left = product_.float().sum(others) if others else product_
    order = [dim for dim in dims if dim in by]
    left = left.permute([order.index(dim) for dim in by]) if by else left
    return {place: float(left[place]) for place in product(*map(range, left.shape))}
