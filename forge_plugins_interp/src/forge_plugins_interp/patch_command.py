"""``forge patch``: where in a model the answer to a prompt is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError
from forge_plugins_interp.out_option import look_at_out, save_results
from forge_plugins_interp.site_pattern import listed
from forge_plugins_interp.tidy_table import Row

if TYPE_CHECKING:
    import torch

    from forge_plugins_interp.session import Session

SITES = "blocks.*.resid_post"
METHODS = ("patching", "attribution", "integrated_gradients")


@attrs.frozen(kw_only=True)
class PatchedPlace:
    """A place whose value of the clean prompt was put into the corrupt one."""

    site: str
    to: str | None = None
    """Where the path ends that begins at ``site``, with ``--from`` and ``--to``."""
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
@click.option("--sites", "patterns", help=f"Names or patterns of what is patched; by default {SITES}.")
@click.option("--from", "senders", help="In place of --sites: where paths begin, by names or patterns.")
@click.option("--to", "receivers", help="Where they end: only what goes from --from straight to --to is patched.")
@click.option("--freeze", help="What no path leads through; by default the outputs of all layers: attn_out, mlp_out.")
@click.option(
    "--by",
    help="A dimension of the sites or two, as position,head; by default position, and with --from none.",
)
@click.option("--metric", default="logit_diff", show_default=True, help="logit_diff, probability, loss or kl.")
@click.option("--answers", help="Texts of one token, with commas; by default what both prompts make likeliest.")
@click.option("--method", type=click.Choice(METHODS), help="How; by default patching.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(Patched)
@click.pass_obj
def patch(
    obj: Any,
    run: Path,
    overrides: tuple[str, ...],
    clean: str,
    corrupt: str,
    patterns: str | None,
    senders: str | None,
    receivers: str | None,
    freeze: str | None,
    by: str | None,
    metric: str,
    answers: str | None,
    method: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Put values of the clean prompt into the corrupt one, place by place, and tell how much of the answer each brings
    back: 0 for nothing, 1 for all. With --from and --to, the values of one site change another one alone."""
    look_at_out(out)
    dims = listed(by if by is not None else "" if senders else "position")
    if len(dims) > 2 or len(set(dims)) < len(dims) or not (dims or senders):
        raise ConfigError(f"--by {by}: must be one dimension or two, such as position,head")
    _refuse_answers(metric, answers)
    _refuse_without_effect(patterns, senders, receivers, freeze, method)
    obj.start_ranks()

    import torch

    from forge_core.commands.table import aligned
    from forge_plugins_interp.figures.patching import patching_figure
    from forge_plugins_interp.patching.metric import metric_named
    from forge_plugins_interp.patching.paths import path_sweep
    from forge_plugins_interp.patching.prompts import Prompts, refuse_pipeline
    from forge_plugins_interp.patching.sweep import sweep
    from forge_plugins_interp.prompt import encoded, texts
    from forge_plugins_interp.session import open_session

    with open_session(run, overrides, catalog=obj.catalog, log=lambda line: click.echo(line, err=True)) as session:
        refuse_pipeline(session)
        for names in (patterns, senders, receivers, freeze):  # before anything is said of the prompts
            session.sites.chosen(listed(names or ""))
        tokens = [encoded(session, "--clean", clean), encoded(session, "--corrupt", corrupt)]
        pair = [torch.tensor([one]) for one in tokens]
        with torch.no_grad():
            logits = [session.model(one) for one in pair]
        chosen = _answers(session, answers, logits, metric)
        measure = metric_named(metric, logits[0], chosen)  # type: ignore[arg-type]  # a pipeline was refused
        prompts = Prompts(pair[0], pair[1], measure)
        how: Any = method or METHODS[0]
        if senders is None or receivers is None:
            columns, across = dims, dims
            rows = sweep(session, prompts, listed(patterns or SITES), by=dims, method=how)
        else:
            columns, across = ["to", *dims], [*dims, "to"]
            frozen = None if freeze is None else listed(freeze)
            rows = path_sweep(session, prompts, listed(senders), listed(receivers), frozen=frozen, by=dims)
        words, shown = texts(session, tokens[0]), texts(session, chosen)
        is_first = session.context.mesh.rank == 0
    if not is_first:
        return
    if as_json:
        print_json(Patched(metric=metric, method=how, answers=shown, places=[_told(row, dims) for row in rows]))
    else:
        print(f"{metric} of {', '.join(map(repr, shown))}, by {how}")
        best = sorted(rows, key=lambda row: -abs(row["effect"]))[:10]
        lines = [
            (row["site"], *(_place(dim, row[dim], words) for dim in columns), f"{row['effect']:+.4f}") for row in best
        ]
        print("\n".join(aligned([("site", *columns, "effect"), *lines])))
    save_results(out, rows, lambda: patching_figure(rows, across, words), as_json=as_json)


def _refuse_without_effect(
    patterns: str | None, senders: str | None, receivers: str | None, freeze: str | None, method: str | None
) -> None:
    if senders is None:
        for option, given in (("--to", receivers), ("--freeze", freeze)):
            if given is not None:
                raise ConfigError(f"{option} {given}: has no effect without --from, the site at which a path begins")
        return
    if receivers is None:
        raise ConfigError(f"--from {senders}: where the path ends is missing; add --to SITE")
    if patterns is not None:
        raise ConfigError(f"--sites {patterns}: has no effect with --from; leave one of them out")
    if method not in (None, "patching"):
        raise ConfigError(f"--method {method}: a path is patched, and not estimated; leave it out")


def _refuse_answers(metric: str, answers: str | None) -> None:
    if answers is not None and metric == "kl":
        raise ConfigError(f"--answers {answers}: has no effect with --metric kl; leave it out")
    if answers is not None and metric in ("probability", "loss") and "," in answers:
        raise ConfigError(f"--answers {answers}: --metric {metric} is of one answer; give one")


def _told(row: Row, dims: Sequence[str]) -> PatchedPlace:
    at = {dim: row[dim] for dim in dims}
    return PatchedPlace(site=row["site"], to=row.get("to"), at=at, value=row["value"], effect=row["effect"])


def _answers(session: Session, given: str | None, logits: list[torch.Tensor | None], metric: str) -> list[int]:
    """Tokens that are given, or the likeliest next tokens of both prompts."""
    from forge_plugins_interp.prompt import one_token, texts

    if given is not None:
        return [one_token(session, "--answers", text) for text in given.split(",")]
    found = [int(one[0, -1].argmax()) for one in logits if one is not None]
    if metric == "logit_diff" and len(set(found)) == 1:
        (text,) = texts(session, found[:1])
        raise ConfigError(
            f"--answers: both prompts make {text!r} likeliest, and logit_diff is of two tokens; give two with a comma, "
            "or another --metric"
        )
    return found


def _place(dim: str, place: Any, words: list[str]) -> str:
    return f"{place} {words[place]!r}" if dim == "position" else str(place)
