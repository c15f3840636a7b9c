"""Path patching: what a site does to the answer through another site alone.

Wang et al. 2022 (arXiv 2211.00593), Goldowsky-Dill et al. 2023 (arXiv 2304.05969).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.interventions import Patch, Replace, Zero
from forge_plugins_interp.patching.places import PatchPlaces, groups_of_places, refuse_dims
from forge_plugins_interp.patching.prompts import Prompts, Span, refuse_pipeline
from forge_plugins_interp.session import Session
from forge_plugins_interp.sites import PlacedSite
from forge_plugins_interp.tidy_table import Row

_LAYERS = ("blocks.*.attn_out", "blocks.*.mlp_out")
"""The outputs of a block's layers, as most models name them."""


def path_sweep(
    session: Session,
    prompts: Prompts,
    senders: Sequence[str],
    receivers: Sequence[str],
    *,
    frozen: Sequence[str] | None = None,
    by: Sequence[str] = (),
) -> list[Row]:
    """How much of the clean prompt's answer each path from a sender to a receiver brings back: 0 for nothing, 1 for
    all.

    First the corrupt prompt is run with the sender's clean value, while frozen sites keep their corrupt ones, to see
    what the receiver then has; second, with that at the receiver, and nothing else changed.

    Args:
        session: on one process, or on ranks without a pipeline.
        senders: names or patterns of the sites at which paths begin.
        receivers: those at which paths end. Each pair of which the receiver is computed later is a path.
        frozen: the sites by which a sender could act otherwise; by default the outputs of all layers, so that nothing
            but the residual stream leads from a site to a later one. The receiver is not frozen, nor is a layer that
            the sender is the input or a part of.
        by: dimensions of the senders of which each index is a place of its own, such as ``("position", "head")``.

    Returns:
        ``site``, which is the sender; ``to``, the receiver; the dimensions of ``by``; ``value`` (the metric) and
        ``effect``, a row a place.

    Raises:
        ConfigError: there is no such site; no receiver is computed later than a sender; or the prompts differ in
            nothing that the metric sees.
    """
    refuse_pipeline(session)
    frozen = _outputs_of_layers(session) if frozen is None else frozen
    begins, ends, layers = (session.sites.chosen(names) for names in (senders, receivers, frozen))
    if [one.name for one in begins] == [one.name for one in ends] and len(begins) == 1:
        raise ConfigError(f"--to {ends[0].name}: is the site that the path comes from; a path needs two")
    with session.intervene(*(Zero(one.name) for one in (*begins, *ends, *layers))):
        pass  # a site that cannot be changed is refused before the first forward
    with torch.no_grad():
        with session.observe(*(one.name for one in begins)) as clean:
            of_clean = float(prompts.measure(session, prompts.clean))
        with session.observe(*(one.name for one in (*begins, *ends, *layers))) as corrupt:
            of_corrupt = float(prompts.measure(session, prompts.corrupt))
    span = Span(of_clean, of_corrupt)
    for placed in begins:
        refuse_dims(placed, by)
    for placed in (*ends, *layers):
        refuse_dims(placed, ())
    rows: list[Row] = []
    for sender, receiver in _pairs(begins, ends, order=list(corrupt)):
        kept = [one.name for one in layers if one.name != receiver.name and not _leads_through(sender, one)]
        freeze = [Replace(name, value=corrupt[name]) for name in kept]
        for places in groups_of_places(sender, clean[sender.name], by):
            copies = prompts.corrupt.expand(len(places), -1)
            change = PatchPlaces(sender.name, source=clean[sender.name], dims=by, places=places)
            with torch.no_grad():
                with session.intervene(*freeze, change), session.observe(receiver.name) as through:
                    session.model(copies)
                with session.intervene(Patch(receiver.name, source=through)):
                    measured = prompts.measure(session, copies).tolist()
            for place, value in zip(places, measured, strict=True):
                at = dict(zip(by, place, strict=True))
                path = {"site": sender.name, "to": receiver.name}
                rows.append({**path, **at, "value": value, "effect": span.effect(value)})
    return rows


def _outputs_of_layers(session: Session) -> Sequence[str]:
    """With those of each modality, as ``blocks.0.text.mlp_out``, and of further layers of a block."""
    names = (name for name in session.sites.here if name.startswith("blocks."))
    return [name for name in names if name.endswith((".attn_out", ".mlp_out"))] or _LAYERS


def _pairs(
    begins: Sequence[PlacedSite], ends: Sequence[PlacedSite], order: Sequence[str]
) -> list[tuple[PlacedSite, PlacedSite]]:
    """Each sender with each receiver that is computed later.

    Args:
        order: the names of all sites, as a forward comes to them.

    Raises:
        ConfigError: there are none.
    """
    when = {name: number for number, name in enumerate(order)}
    pairs = [(begin, end) for begin in begins for end in ends if when[begin.name] < when[end.name]]
    if not pairs:
        latest, earliest = max(ends, key=lambda one: when[one.name]), min(begins, key=lambda one: when[one.name])
        raise ConfigError(
            f"--to {latest.name}: is computed before {earliest.name}, so that no path leads there from it; "
            "swap them, or choose a later site"
        )
    return pairs


def _leads_through(sender: PlacedSite, layer: PlacedSite) -> bool:
    """Return whether a sender acts by the output of this layer alone: as a part of the layer, or as its input."""
    is_part = f"{sender.site.module}.".startswith(f"{layer.site.module}.")
    return is_part or (sender.name.endswith("_in") and f"{sender.name.removesuffix('_in')}_out" == layer.name)
