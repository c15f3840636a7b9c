"""``forge extract``: values of sites, for all samples of some data, to a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_core.errors import ConfigError
from forge_plugins_interp.site_pattern import listed

if TYPE_CHECKING:
    from forge_core.contracts.data_source import DataSource
    from forge_plugins_interp.reduction import Reduction
    from forge_plugins_interp.session import Session
    from forge_plugins_interp.stimuli import Stimuli
    from forge_plugins_interp.token_pattern import TokenPattern


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--sites", "patterns", required=True, help='Names with commas, or patterns: "blocks.*.resid_post".')
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder of the store.")
@click.option("--samples", default=0, type=click.IntRange(min=0), help="The first so many; all by default.")
@click.option("--stimuli", type=click.Path(path_type=Path), help="A .csv or .jsonl of texts, in place of data.")
@click.option("--column", help="With --stimuli: the column that has the texts; text by default.")
@click.option(
    "--reduce",
    "over",
    default="none",
    show_default=True,
    type=click.Choice(["none", "last", "mean"]),
    help="Keep each position, the last of a sample, or the mean over a sample.",
)
@click.option("--match", help=r"Keep tokens whose text this regular expression matches as a whole: \s*def.")
@click.option("--positions", help="Keep these positions of each sample, such as 0,-1; negative ones from its end.")
@click.option("--features", default=0, type=click.IntRange(min=0), help="Project on so many directions.")
@click.option(
    "--directions",
    default="random",
    show_default=True,
    type=click.Choice(["random", "principal"]),
    help="With --features: random ones, which keep distances, or principal components, which keep variance.",
)
@click.option(
    "--fit-samples",
    type=click.IntRange(min=1),
    help="With --directions principal: the first so many, on which components are fitted; 256 by default.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the store; by default as computed."
)
@click.pass_obj
def extract(
    obj: Any,
    run: Path,
    overrides: tuple[str, ...],
    patterns: str,
    out: Path,
    samples: int,
    stimuli: Path | None,
    column: str | None,
    over: str,
    match: str | None,
    positions: str | None,
    features: int,
    directions: str,
    fit_samples: int | None,
    dtype: str | None,
) -> None:
    """Write what RUN's model computes at some sites to a store, which any process or layout can read and go on with.

    OVERRIDES are settings of the job: data.path=… names the data, by default what the run holds out; parallel.tp=2 a
    layout. The same command goes on with a store that is not complete.
    """
    chosen = listed(patterns)
    if not chosen:
        raise ConfigError(f"--sites {patterns!r}: names no site; forge sites {run} lists them")
    if column is not None and stimuli is None:
        raise ConfigError(f"--column {column}: has no effect without --stimuli; leave it out")
    kept = _positions(positions)
    if kept and over != "none":
        raise ConfigError(f"--positions {positions}: has no effect with --reduce {over}; leave one of them out")
    if directions == "principal" and not features:
        raise ConfigError("--directions principal: how many is missing; add --features 64")
    if fit_samples is not None and directions != "principal":
        raise ConfigError(f"--fit-samples {fit_samples}: has no effect without --directions principal; leave it out")
    obj.start_ranks()

    import torch

    from forge_core.job import settings_of
    from forge_plugins_interp.extraction import Request, extract
    from forge_plugins_interp.reduction import Reduction
    from forge_plugins_interp.session import open_session

    def say(line: str) -> None:
        click.echo(line, err=True)

    data, others = settings_of("data", overrides)
    if data and stimuli is not None:
        raise ConfigError(f"{data[0]}: has no effect with --stimuli; leave one of them out")
    wanted = None if dtype is None else getattr(torch, dtype)
    chosen_ones: Any = {"over": over, "directions": directions}
    if fit_samples is not None:
        chosen_ones["fit_samples"] = fit_samples
    with open_session(run, others, catalog=obj.catalog, log=say) as session:
        tokens = None if match is None else _tokens(session, match)
        reduction = Reduction(tokens=tokens, positions=kept, features=features, dtype=wanted, **chosen_ones)
        source: DataSource | Stimuli = (
            session.open_data(data) if stimuli is None else _stimuli(session, stimuli, column or "text")
        )
        request = Request(
            out=out,
            sites=chosen,
            reduction=reduction,
            samples=samples,
            columns=getattr(source, "columns", {}),
            origin=_origin(session, source, reduction),
        )
        extract(session, source, request, say if session.context.mesh.rank == 0 else lambda line: None)
        if session.context.mesh.rank == 0:
            print(f"wrote {out}")


def _tokens(session: Session, match: str) -> TokenPattern:
    from forge_plugins_interp.token_pattern import TokenPattern

    if session.tokenizer is None:
        raise ConfigError("--match: the checkpoint has no tokenizer, so that its tokens have no text")
    return TokenPattern.of(match, session.tokenizer)


def _positions(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--positions {text}: must be numbers with commas between them, such as 0,-1") from None


def _stimuli(session: Session, path: Path, column: str) -> Stimuli:
    from forge_plugins_interp.stimuli import Stimuli

    if session.tokenizer is None:
        raise ConfigError("--stimuli: the checkpoint has no tokenizer, so that text means nothing to it")
    parallel = session.context.job.parallel
    longest: Any = session.built.parts[0].max_seq_len
    return Stimuli(path, column, session.tokenizer, longest=longest, multiple=2 * parallel.cp * parallel.tp)


def _origin(session: Session, source: DataSource | Stimuli, reduction: Reduction) -> dict[str, Any]:
    """What decides the numbers, for the manifest; a layout does not."""
    from forge_plugins_interp.session import digest_of

    checkpoint = session.checkpoint
    assert checkpoint is not None, "it was opened from one"
    return {
        "run": str(checkpoint.job().get("run", {}).get("name", "")),
        "step": checkpoint.step,
        "checkpoint": digest_of(checkpoint.path),
        "data": source.fingerprint,
        "tokenizer": None if session.tokenizer is None else session.tokenizer.fingerprint,
        "match": None if reduction.tokens is None else reduction.tokens.text,
        "reduction": reduction.words(),
        "versions": dict(checkpoint.manifest.versions),
    }
