"""``forge patch``: where in a model the answer to a prompt is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError
from forge_plugins_interp.tidy_table import Row, refuse_other_ending, save_results

if TYPE_CHECKING:
    import torch

    from forge_plugins_interp.session import Session

METHODS = ("patching", "attribution", "integrated_gradients")


@attrs.frozen(kw_only=True)
class PatchedPlace:
    """A place whose value of the clean prompt was put into the corrupt one."""

    site: str
    at: Mapping[str, int]
    """Where: a number for each dimension of ``--by``."""
    value: float
    """Of the metric."""
    effect: float
    """How much of the answer it brings back: 0 for nothing, 1 for all."""


@attrs.frozen(kw_only=True)
class Patched:
    """Where the answer to a prompt is."""

    metric: str
    method: str
    answers: Sequence[str]
    places: Sequence[PatchedPlace]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--clean", required=True, help="The prompt with the answer.")
@click.option("--corrupt", required=True, help="The prompt without it, of as many tokens.")
@click.option("--sites", "patterns", default="blocks.*.resid_post", show_default=True, help="Names or patterns.")
@click.option("--by", default="position", show_default=True, help="A dimension of the sites or two, as position,head.")
@click.option("--metric", default="logit_diff", show_default=True, help="logit_diff, probability, loss or kl.")
@click.option("--answers", help="Texts of one token, with commas; by default what both prompts make likeliest.")
@click.option("--method", type=click.Choice(METHODS), default="patching", show_default=True, help="How.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(Patched)
@click.pass_obj
def patch(
    obj: Any,
    run: Path,
    overrides: tuple[str, ...],
    clean: str,
    corrupt: str,
    patterns: str,
    by: str,
    metric: str,
    answers: str | None,
    method: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Put values of the clean prompt into the corrupt one, place by place, and tell how much of the answer each brings
    back: 0 for nothing, 1 for all."""
    refuse_other_ending(out)

    import torch

    from forge_core.commands.table import aligned
    from forge_plugins_interp.figures.patching import patching_figure
    from forge_plugins_interp.patching.metric import metric_named
    from forge_plugins_interp.patching.sweep import Prompts, sweep
    from forge_plugins_interp.prompt import encoded, texts
    from forge_plugins_interp.session import open_session
    from forge_plugins_interp.site_pattern import listed

    dims, sites = listed(by), listed(patterns)
    if len(dims) not in (1, 2):
        raise ConfigError(f"--by {by}: must be one dimension or two, such as position,head")
    with open_session(run, overrides, catalog=obj.catalog, log=lambda line: click.echo(line, err=True)) as session:
        tokens = [encoded(session, "--clean", clean), encoded(session, "--corrupt", corrupt)]
        pair = [torch.tensor([one]) for one in tokens]
        with torch.no_grad():
            logits = [session.model(one) for one in pair]
        chosen = _answers(session, answers, logits)
        measure = metric_named(metric, logits[0], chosen)  # type: ignore[arg-type]  # one process has all logits
        rows = sweep(session, Prompts(pair[0], pair[1], measure), sites, by=dims, method=method)  # type: ignore[arg-type]
        words, shown = texts(session, tokens[0]), texts(session, chosen)
    if as_json:
        print_json(Patched(metric=metric, method=method, answers=shown, places=[_told(row, dims) for row in rows]))
    else:
        print(f"{metric} of {', '.join(map(repr, shown))}, by {method}")
        best = sorted(rows, key=lambda row: -abs(row["effect"]))[:10]
        lines = [
            (row["site"], *(_place(dim, row[dim], words) for dim in dims), f"{row['effect']:+.4f}") for row in best
        ]
        print("\n".join(aligned([("site", *dims, "effect"), *lines])))
    save_results(out, rows, lambda: patching_figure(rows, dims, words), as_json=as_json)


def _told(row: Row, dims: Sequence[str]) -> PatchedPlace:
    at = {dim: row[dim] for dim in dims}
    return PatchedPlace(site=row["site"], at=at, value=row["value"], effect=row["effect"])


def _answers(session: Session, texts: str | None, logits: list[torch.Tensor | None]) -> list[int]:
    """Tokens that are given, or the likeliest next tokens of both prompts."""
    from forge_plugins_interp.prompt import one_token

    if texts is not None:
        return [one_token(session, "--answers", text) for text in texts.split(",")]
    return [int(one[0, -1].argmax()) for one in logits if one is not None]


def _place(dim: str, index: int, words: list[str]) -> str:
    return f"{index} {words[index]!r}" if dim == "position" else str(index)
