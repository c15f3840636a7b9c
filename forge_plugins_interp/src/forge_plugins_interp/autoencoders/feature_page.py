"""Latents as HTML: one style, no script, no pictures from elsewhere. All texts of others are escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib import resources

from forge_plugins_interp.autoencoders.dashboard import Dashboard
from forge_plugins_interp.autoencoders.features import Context, Features, Latent

_WIDTH, _HEIGHT, _FLOOR = 320, 96, 74
"""Of a histogram, and where its bars stand, in pixels."""
_BINS_A_DECADE = 4


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_OF_PAGE = (
    ":root { color-scheme: light dark } "
    "body { font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 1500px; padding: 0 1rem }"
)


def features_page(dashboard: Dashboard, title: str) -> str:
    """A page that is complete in itself."""
    name = escape(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{name}</title>
<style>{_OF_PAGE}</style>
</head>
<body>
<h1>{name}</h1>
{style()}
{features_html(dashboard)}
</body>
</html>
"""


def style() -> str:
    """Stands once on a page that has ``features_html``."""
    css = resources.files(__package__).joinpath("feature_page.css").read_text(encoding="utf-8")
    return f"<style>{css}</style>"


def features_html(dashboard: Dashboard) -> str:
    """How often latents fire, and the cards."""
    found = dashboard.features
    notes = "".join(f'<p class="problem">{escape(note)}</p>' for note in dashboard.notes)
    held_out = "all" if found.held_out == found.rows else f"{found.held_out:,}"
    target = f" to {dashboard.target_site}" if dashboard.target_site else ""
    words = (
        f"{len(found.density):,} latents of {dashboard.site}{target}, over {found.rows:,} rows, {held_out} of them "
        f"held out. {found.silent:.1%} of the latents are silent: they fire in none of these rows."
    )
    cards = "\n".join(_card(latent, dashboard) for latent in found.latents)
    return (
        f"{notes}<p>{escape(words)}</p>{_densities(found)}"
        f'<p class="note">{escape(_legend(dashboard))}</p><div class="latents">{cards}</div>'
    )


def _legend(dashboard: Dashboard) -> str:
    words = (
        "A card has the samples in which its latent is strongest. The colour of a token is the activation there; the "
        "outlined one is the strongest. Activations are of rows that are scaled to a mean norm of √width."
    )
    of_logits = (
        " A latent raises and lowers the logits of the tokens named most, by what the model's own norm and head make "
        "of its direction."
    )
    return words + of_logits * bool(dashboard.weights)


def _densities(found: Features) -> str:
    """The histogram of log10 densities of the latents that fire."""
    least = min(-1, math.floor(math.log10(1 / found.rows)))
    n_bins = -least * _BINS_A_DECADE
    counts = [0] * n_bins
    for density in found.density.tolist():
        if density > 0:
            counts[min(int((math.log10(density) - least) * _BINS_A_DECADE), n_bins - 1)] += 1
    names = [
        f"{counts[place]:,} latents fire in 10^{least + place / _BINS_A_DECADE:g} to "
        f"10^{least + (place + 1) / _BINS_A_DECADE:g} of the rows"
        for place in range(n_bins)
    ]
    ticks = [(place * _BINS_A_DECADE, f"10^{least + place}") for place in range(-least + 1)]
    return _bars("latents by the share of rows in which they fire", counts, names, ticks)


def _card(latent: Latent, dashboard: Dashboard) -> str:
    if latent.strongest == 0:
        return f'<div class="latent"><h4>Latent {latent.number}</h4><p>It fires in none of the rows.</p></div>'
    facts = f"fires in {latent.density:.3%} of rows; mean {latent.mean:.3g}, strongest {latent.strongest:.3g}"
    step = latent.strongest / len(latent.counts)
    names = [
        f"{count:,} rows with an activation of {place * step:.3g} to {(place + 1) * step:.3g}"
        for place, count in enumerate(latent.counts)
    ]
    ticks = [(0, "0"), (len(latent.counts), f"{latent.strongest:.3g}")]
    bars = _bars(f"rows by the activation of latent {latent.number}", latent.counts, names, ticks)
    contexts = "".join(_line(context, latent, dashboard) for context in latent.contexts)
    return (
        f'<div class="latent"><h4>Latent {latent.number}</h4><p>{escape(facts)}</p>{bars}{_logits(latent, dashboard)}'
        f"<ol>{contexts}</ol></div>"
    )


def _logits(latent: Latent, dashboard: Dashboard) -> str:
    rows = [row for row in dashboard.logit_rows() if row["latent"] == latent.number]
    lines = []
    for effect in ("raises", "lowers"):
        tokens = "".join(
            f'<span title="{row["weight"]:+.3g}">{escape(_visible(row["text"], row["token"]))}</span>'
            for row in rows
            if row["effect"] == effect
        )
        lines += [f'<p class="logits">{effect} {tokens}</p>'] if tokens else []
    return "".join(lines)


def _line(context: Context, latent: Latent, dashboard: Dashboard) -> str:
    between = " " if dashboard.tokenizer is None else ""
    parts = []
    for offset, token in enumerate(context.tokens):
        text = escape(_visible(dashboard.word(token), token))
        activation = context.activations[offset] if context.activations else 0.0
        if activation > 0:
            share = min(activation / latent.strongest, 1.0)
            is_strongest = context.first + offset == context.position
            text = (
                f'<span{" class=strongest" * is_strongest} style="background:rgba(230,120,20,{0.1 + 0.6 * share:.2f})" '
                f'title="{activation:.3g}">{text}</span>'
            )
        parts.append(text)
    place = "whole sample" if context.position is None else f"position {context.position}"
    where = f"sample {context.stimulus_id}, {place}"
    return f'<li><i title="{escape(where)}">{context.activation:.3g}</i>{between.join(parts)}</li>'


def _visible(text: str, token: int) -> str:
    """The text of a token with signs for white space; its number where it is no text by itself, as part of a letter."""
    shown = text.replace("\n", "⏎").replace("\r", "␍").replace("\t", "⇥")
    return shown if shown.isprintable() and "\ufffd" not in shown else f"⟨{token}⟩"


def _bars(label: str, counts: Sequence[int], names: Sequence[str], ticks: Sequence[tuple[int, str]]) -> str:
    """A histogram. A bar has its own words under the pointer; a tick is at the left of a bar."""
    width, most = _WIDTH / len(counts), max(max(counts), 1)
    parts = [f'<text x="0" y="10">{escape(label)}; at most {most:,}</text>']
    for place, (count, name) in enumerate(zip(counts, names, strict=True)):
        if count:
            height = max(1.0, count / most * (_FLOOR - 16))
            parts.append(
                f'<rect x="{place * width:.1f}" y="{_FLOOR - height:.1f}" width="{max(width - 1, 0.5):.1f}" '
                f'height="{height:.1f}"><title>{escape(name)}</title></rect>'
            )
    for place, text in ticks:
        anchor = "start" if place == 0 else "end" if place == len(counts) else "middle"
        parts.append(f'<text x="{place * width:.1f}" y="{_FLOOR + 13}" text-anchor="{anchor}">{escape(text)}</text>')
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg class="bars" role="img" aria-label="{escape(label)}" {box}>{"".join(parts)}</svg>'
