"""Activation patching: the corrupt prompt is run with some values of the clean one, place by place.

Meng et al. 2022 (arXiv 2202.05262), Wang et al. 2022 (arXiv 2211.00593); by gradients, Nanda 2023 and Syed et al. 2023
(arXiv 2310.10348).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Literal

import attrs
import torch

from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_interp.interventions import Patch, Replace, WholeIntervention
from forge_plugins_interp.patching.metric import Metric
from forge_plugins_interp.placement import own_part, summed, whole
from forge_plugins_interp.session import Session
from forge_plugins_interp.sites import PlacedSite
from forge_plugins_interp.tidy_table import Row

Method = Literal["patching", "attribution", "integrated_gradients"]
_TOGETHER = 16
"""Places that are patched in one forward, each in a copy of the prompt."""
_STEPS = 8
"""Points of the path of integrated gradients."""


@attrs.frozen
class Prompts:
    """Two prompts of equal length, and what they are measured by."""

    clean: torch.Tensor
    """``(1, S)`` int64."""
    corrupt: torch.Tensor
    metric: Metric

    def __attrs_post_init__(self) -> None:
        if self.clean.shape != self.corrupt.shape:
            raise ConfigError(
                f"the clean prompt has {self.clean.shape[1]} tokens, and the corrupt one {self.corrupt.shape[1]}; "
                "patching needs equally many"
            )


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
    if session.context.mesh.degrees["pp"] > 1:
        raise ConfigError("patching needs the logits on all ranks; open the model with parallel.pp=1")
    chosen = session.sites.chosen(sites)
    names = [placed.name for placed in chosen]
    with torch.no_grad():
        with session.observe(*names) as clean:
            of_clean = float(prompts.metric(_logits(session, prompts.clean)))
        for placed in chosen:
            _refuse_dims(placed, by)
        with session.observe(*names) as corrupt:
            of_corrupt = float(prompts.metric(_logits(session, prompts.corrupt)))
    if abs(of_clean - of_corrupt) < 1e-7:
        raise ConfigError(f"the metric is {of_clean:.6g} for both prompts, so that nothing can be brought back")
    values = _METHODS[method](session, prompts, chosen, clean, corrupt, by)
    rows: list[Row] = []
    for placed in chosen:
        for place, change in values[placed.name].items():
            value = change if method == "patching" else of_corrupt + change
            effect = (value - of_corrupt) / (of_clean - of_corrupt)
            rows.append({"site": placed.name, **dict(zip(by, place, strict=True)), "value": value, "effect": effect})
    return rows


def path_patch(session: Session, prompts: Prompts, sender: str, receiver: str, frozen: Sequence[str]) -> float:
    """The effect of ``sender`` through ``receiver`` alone (Goldowsky-Dill et al. 2023, arXiv 2304.05969).

    First the corrupt prompt is run with the sender's clean value, while ``frozen`` keep their corrupt ones, to see what
    the receiver then has; second, with that at the receiver alone.

    Args:
        frozen: names or patterns of the sites by which the sender could act otherwise, such as
            ``["blocks.*.attn_out", "blocks.*.mlp_out"]``. The sender is none of them.

    Returns:
        As ``effect`` in ``sweep``.
    """
    kept = [placed.name for placed in session.sites.chosen(frozen) if placed.name not in (sender, receiver)]
    with torch.no_grad():
        with session.observe(sender) as clean:
            of_clean = float(prompts.metric(_logits(session, prompts.clean)))
        with session.observe(*kept, receiver) as corrupt:
            of_corrupt = float(prompts.metric(_logits(session, prompts.corrupt)))
        changes = [Patch(sender, source=clean), *(Patch(name, source=corrupt) for name in kept)]
        with session.intervene(*changes), session.observe(receiver) as through:
            session.model(prompts.corrupt)
        with session.intervene(Patch(receiver, source=through)):
            patched = float(prompts.metric(_logits(session, prompts.corrupt)))
    if abs(of_clean - of_corrupt) < 1e-7:
        raise ConfigError(f"the metric is {of_clean:.6g} for both prompts, so that nothing can be brought back")
    return (patched - of_corrupt) / (of_clean - of_corrupt)


Place = tuple[int, ...]
Values = Mapping[str, torch.Tensor]


def _by_patching(
    session: Session, prompts: Prompts, chosen: Sequence[PlacedSite], clean: Values, corrupt: Values, by: Sequence[str]
) -> dict[str, dict[Place, float]]:
    """The metric of each place, patched."""
    found: dict[str, dict[Place, float]] = {}
    for placed in chosen:
        found[placed.name] = {}
        places = _places(placed, clean[placed.name], by)
        for start in range(0, len(places), _TOGETHER):
            some = places[start : start + _TOGETHER]
            change = _PatchRows(placed.name, source=clean[placed.name], dims=by, places=some)
            with torch.no_grad(), session.intervene(change):
                measured = prompts.metric(_logits(session, prompts.corrupt.expand(len(some), -1)))
            found[placed.name] |= dict(zip(some, measured.tolist(), strict=True))
    return found


def _by_attribution(
    session: Session, prompts: Prompts, chosen: Sequence[PlacedSite], clean: Values, corrupt: Values, by: Sequence[str]
) -> dict[str, dict[Place, float]]:
    names = [placed.name for placed in chosen]
    with session.observe(*names, gradients=True) as seen:
        torch.autograd.backward(prompts.metric(_logits(session, prompts.corrupt)).sum())
    return {
        placed.name: _summed(placed, (clean[placed.name] - corrupt[placed.name]) * seen.grad(placed.name), by)
        for placed in chosen
    }


def _by_integrated_gradients(
    session: Session, prompts: Prompts, chosen: Sequence[PlacedSite], clean: Values, corrupt: Values, by: Sequence[str]
) -> dict[str, dict[Place, float]]:
    found = {}
    for placed in chosen:
        start, way = corrupt[placed.name], clean[placed.name] - corrupt[placed.name]
        total = torch.zeros_like(start)
        for number in range(_STEPS):
            point = (start + (number + 0.5) / _STEPS * way).requires_grad_()
            with session.intervene(Replace(placed.name, value=point)):
                torch.autograd.backward(prompts.metric(_logits(session, prompts.corrupt)).sum())
            assert point.grad is not None, "the metric depends on it"
            part = own_part(point.grad, placed.cuts)  # of what this rank has put in
            total += whole(summed(part, placed.sums), placed.cuts) / session.context.mesh.degrees["cp"]
        for parameter in session.built.parameters.values():
            parameter.grad = None
        found[placed.name] = _summed(placed, way * total / _STEPS, by)
    return found


_METHODS: Mapping[Method, Callable[..., dict[str, dict[Place, float]]]] = {
    "patching": _by_patching,
    "attribution": _by_attribution,
    "integrated_gradients": _by_integrated_gradients,
}


@attrs.frozen(kw_only=True, eq=False)
class _PatchRows(WholeIntervention):
    """Each sample of the batch is patched at a place of its own."""

    kind = "patch_rows"
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


def _places(placed: PlacedSite, value: torch.Tensor, by: Sequence[str]) -> list[Place]:
    return list(product(*(range(value.shape[placed.site.dims.index(dim)]) for dim in by)))


def _summed(placed: PlacedSite, product_: torch.Tensor, by: Sequence[str]) -> dict[Place, float]:
    """The sum over what is no place of its own."""
    dims = placed.site.dims
    others = [number for number, dim in enumerate(dims) if dim not in by]
    left = product_.float().sum(others) if others else product_
    order = [dim for dim in dims if dim in by]
    left = left.permute([order.index(dim) for dim in by]) if by else left
    return {place: float(left[place]) for place in product(*map(range, left.shape))}


def _refuse_dims(placed: PlacedSite, by: Sequence[str]) -> None:
    dims = placed.site.dims
    if dims[0] != "sample":
        raise ConfigError(f"site {placed.name}: has the dimensions {', '.join(dims)}, and no samples first")
    for dim in by:
        if dim not in dims[1:]:
            hint = nearest_hint(dim, dims[1:])
            raise ConfigError(f"--by {dim}: site {placed.name} has the dimensions {', '.join(dims[1:])}{hint}")


def _logits(session: Session, tokens: torch.Tensor) -> torch.Tensor:
    logits = session.model(tokens)
    assert logits is not None, "a pipeline was refused"
    return logits
