"""``forge lens``: what each layer would predict, and what it adds to a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError
from forge_plugins_interp.out_option import look_at_out, save_results
from forge_plugins_interp.tidy_table import Row

if TYPE_CHECKING:
    from forge_plugins_interp.session import Session

_Lines = list[tuple[str, ...]]


@attrs.frozen(kw_only=True)
class Prediction:
    """A token that a layer would predict."""

    site: str
    layer: int
    position: int
    """In the prompt."""
    token: str
    """At this position."""
    place: int
    """1 for the likeliest."""
    predicted: str
    log_probability: float
    """In nats, as the next one."""
    entropy: float
    """Of the prediction at this site and position."""
    next_log_probability: float | None
    """Of the token that follows in the prompt; null at its end."""
    next_place: int | None


@attrs.frozen(kw_only=True)
class Addition:
    """What a part of the model adds to the logit of ``--attribute``."""

    part: str
    """``embed``, ``blocks.3.attn``, ``blocks.3.mlp``, ``blocks.3``, ``blocks.3.head.5`` or ``bias``."""
    layer: int
    contribution: float


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--prompt", required=True, help="The text.")
@click.option("--sites", "patterns", default="", help="Values of the residual stream; by default blocks.*.resid_post.")
@click.option("--top", default=1, show_default=True, type=click.IntRange(min=1), help="So many tokens at each place.")
@click.option("--attribute", metavar="TOKEN", help="Instead: what layers add to the logit of this token.")
@click.option("--minus", metavar="TOKEN", help="With --attribute: minus the logit of this one.")
@click.option("--heads", is_flag=True, help="With --attribute: attention by heads.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(list[Prediction] | list[Addition])
@click.pass_obj
def lens(
    obj: Any,
    run: Path,
    overrides: tuple[str, ...],
    prompt: str,
    patterns: str,
    top: int,
    attribute: str | None,
    minus: str | None,
    heads: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Read the residual stream of RUN's model by its own norm and head, at each layer and position of a prompt.

    A run with the pass tuned_lens is read through what it has trained.
    """
    look_at_out(out)
    if attribute is None and (minus is not None or heads):
        raise ConfigError(f"{'--minus' if minus is not None else '--heads'}: has no effect without --attribute")
    if attribute is not None and (patterns or top != 1):
        raise ConfigError(f"{'--sites' if patterns else '--top'}: has no effect with --attribute; leave it out")

    from forge_core.commands.table import aligned
    from forge_plugins_interp.session import open_session
    from forge_plugins_interp.site_pattern import listed

    with open_session(run, overrides, catalog=obj.catalog, log=lambda line: click.echo(line, err=True)) as session:
        if attribute is None:
            rows, lines, figure = _lens(session, prompt, listed(patterns), top)
        else:
            rows, lines, figure = _attribution(session, prompt, attribute, minus, heads=heads)
    if as_json:
        told: type[Prediction | Addition] = Prediction if attribute is None else Addition
        print_json([told(**row) for row in rows])
    else:
        print("\n".join(aligned(lines)))
    save_results(out, rows, figure, as_json=as_json)


def _lens(session: Session, prompt: str, patterns: list[str], top: int) -> tuple[list[Row], _Lines, Any]:
    """Rows of results, lines of a table, and what draws them."""
    import torch

    from forge_plugins_interp.figures.lens import lens_figure
    from forge_plugins_interp.lenses.logit_lens import lens_rows, logit_lens
    from forge_plugins_interp.prompt import encoded, texts, tokenizer_of

    tokens = encoded(session, "--prompt", prompt)
    found = logit_lens(session, torch.tensor([tokens]), patterns)
    logits = {name: value[0] for name, value in found.items() if value is not None}
    tokenizer = tokenizer_of(session)
    rows = lens_rows(logits, tokens, lambda token: tokenizer.decode([token]), top)
    words = texts(session, tokens)
    lines: _Lines = [("site", *(repr(word) for word in words))]
    for site in logits:
        of_site = [row for row in rows if row["site"] == site]
        cells = ["" for _ in tokens]
        for row in of_site:
            cells[row["position"]] += f"{' ' if cells[row['position']] else ''}{row['predicted']!r}"
        lines.append((site, *cells))
    return rows, lines, lambda: lens_figure([row for row in rows if row["place"] == 1], words)


def _attribution(
    session: Session, prompt: str, attribute: str, minus: str | None, *, heads: bool
) -> tuple[list[Row], _Lines, Any]:
    """The same."""
    import torch

    from forge_plugins_interp.figures.contributions import contributions_figure
    from forge_plugins_interp.lenses import attribution
    from forge_plugins_interp.prompt import encoded, one_token

    tokens = torch.tensor([encoded(session, "--prompt", prompt)])
    token = one_token(session, "--attribute", attribute)
    other = None if minus is None else one_token(session, "--minus", minus)
    found = attribution.attribute(session, tokens, token, minus=other, heads=heads)
    what = f"logit of {attribute!r}" + ("" if minus is None else f" minus that of {minus!r}")
    total = sum(one.value for one in found)
    lines: _Lines = [("part", what), *((one.part, f"{one.value:+.4f}") for one in found), ("sum", f"{total:+.4f}")]
    rows: list[Row] = [{"part": one.part, "layer": one.layer, "contribution": one.value} for one in found]
    return rows, lines, lambda: contributions_figure([one.part for one in found], [one.value for one in found], what)
