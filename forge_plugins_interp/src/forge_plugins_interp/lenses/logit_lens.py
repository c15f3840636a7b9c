"""The logit lens: logits that the model would give if the residual stream were read out early (nostalgebraist 2020).
With the translators of a tuned lens, if the model has been trained with the pass ``tuned_lens``.

Shapes: B = batch, S = sequence, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.interventions import Patch
from forge_plugins_interp.lenses.tuned_lens import translators_of
from forge_plugins_interp.session import Session
from forge_plugins_interp.tidy_table import Row
from forge_plugins_interp.wide import wide


def logit_lens(session: Session, tokens: torch.Tensor, sites: Sequence[str] = ()) -> dict[str, torch.Tensor | None]:
    """The logits of each site, as if it were the output of the last block: norm, head, and all that comes after it.

    The model itself reads out: it runs once more for each site, with the last block's output replaced. So this is right
    in every layout, and the logits of the last block's output are the model's. A model with a tuned lens has values
    translated first.

    Args:
        tokens: ``(B, S)`` int64.
        sites: names or patterns of sites of the residual stream; by default ``blocks.*.resid_post``.

    Returns:
        ``(B, S, V)`` by site, in the order of layers; ``None`` on ranks of earlier pipeline stages.

    Raises:
        ConfigError: a site is no value of the residual stream, or has no translator.
    """
    names = stream_sites(session, sites or ["blocks.*.resid_post"])
    last = last_residual(session)
    translate = {name: _translator(session, name, last) for name in names}
    found: dict[str, torch.Tensor | None] = {}
    with torch.no_grad():
        with session.observe(*names, last) as seen:
            session.model(tokens)
        for name in names:
            of_stages = session.context.mesh.gather_over("pp", seen.get(name))
            value = next(one for one in of_stages if one is not None)
            with session.intervene(Patch(last, source={last: translate[name](value)})):
                found[name] = session.model(tokens)
    return found


def _translator(session: Session, name: str, last: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Raises:
        ConfigError: the model has translators, and none for this site.
    """
    translators = translators_of(session.built.parts[0])
    if not translators or name == last:
        return lambda value: value
    *_, layer, end = name.split(".") if name.startswith("blocks.") else ("", "")
    keys = [*translators]
    if end == "resid_pre":
        return translators[layer].translate
    if end == "resid_post":
        return translators[keys[keys.index(layer) + 1]].translate
    raise ConfigError(
        f"site {name}: a tuned lens has translators for what lies between blocks: blocks.*.resid_pre and resid_post"
    )


def stream_sites(session: Session, patterns: Sequence[str]) -> list[str]:
    """The names on all stages, in the order of layers.

    Raises:
        ConfigError: one is no value of the residual stream.
    """
    names = list(dict.fromkeys(name for pattern in patterns for name in session.sites.names(pattern)))
    for name in names:
        placed = session.sites.here.get(name)
        if placed is not None and placed.site.dims != ("sample", "position", "width"):
            raise ConfigError(
                f"site {name}: has the dimensions {', '.join(placed.site.dims)}, and a lens reads values of the "
                "residual stream: sample, position, width"
            )
    return sorted(names, key=lambda name: (layer_of(name), names.index(name)))


def last_residual(session: Session) -> str:
    """The output of the last block."""
    return max(session.sites.names("blocks.*.resid_post"), key=layer_of)


def layer_of(name: str) -> int:
    """The number of the block; −1 before all of them."""
    return int(name.split(".")[1]) if name.startswith("blocks.") else -1


def lens_rows(logits: dict[str, torch.Tensor], tokens: Sequence[int], words: Any, top: int = 1) -> list[Row]:
    """A row for each site, position and rank of the likeliest tokens.

    Args:
        logits: ``(S, V)`` by site.
        tokens: of the prompt.
        words: from a token's id to its text.
        top: how many tokens at each place.
    """
    rows: list[Row] = []
    for site, values in logits.items():
        log = torch.log_softmax(wide(values), -1)
        entropies = -(log.exp() * log).sum(-1)
        for position, (one, entropy) in enumerate(zip(log, entropies.tolist(), strict=True)):
            following = tokens[position + 1] if position + 1 < len(tokens) else None
            best = one.topk(min(top, len(one)))
            for place, (value, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True), 1):
                rows.append(
                    {
                        "site": site,
                        "layer": layer_of(site),
                        "position": position,
                        "token": words(tokens[position]),
                        "place": place,
                        "predicted": words(token),
                        "log_probability": value,
                        "entropy": entropy,
                        "next_log_probability": None if following is None else float(one[following]),
                        "next_place": None if following is None else int((one > one[following]).sum()) + 1,
                    }
                )
    return rows
