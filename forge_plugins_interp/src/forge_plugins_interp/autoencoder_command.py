"""``forge autoencoder``: what an autoencoder leaves of a model, and its files for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError
from forge_plugins_interp.out_option import refuse_no_folder, writing
from forge_plugins_interp.tidy_table import write_csv


@attrs.frozen(kw_only=True)
class Recovered:
    """What is left of a model with an autoencoder in it. Losses are nats a token."""

    loss: float
    """Of the model itself."""
    loss_with_dictionary: float
    loss_with_zeros: float
    """With zeros in the place of the site's value."""
    recovered: float
    """0 for no better than zeros, 1 for as good as the model itself."""
    kl: float
    """Of the model's prediction from that with the autoencoder, in nats a token."""


@click.group()
def autoencoder() -> None:
    """Sparse autoencoders that forge run has trained, or that SAELens and sparsify have written."""


@autoencoder.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("dictionary", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--site", help="Where it stands in, such as blocks.2.resid_post; by default where it was trained.")
@click.option("--reads", help="The site that a transcoder reads; by default the one that it was trained on.")
@click.option("--samples", default=32, show_default=True, type=click.IntRange(min=1), help="Of held-out data.")
@json_option(Recovered)
@click.pass_obj
def recover(
    obj: Any,
    run: Path,
    dictionary: Path,
    overrides: tuple[str, ...],
    site: str | None,
    reads: str | None,
    samples: int,
    as_json: bool,
) -> None:
    """Put what DICTIONARY reconstructs, or a transcoder predicts, into RUN's model, and tell how much of the loss that
    recovers.

    DICTIONARY is a run's directory, a checkpoint's, or a folder of SAELens or sparsify, which needs --site.
    """
    from forge_core.job import settings_of
    from forge_plugins_interp.autoencoders.splice import Splice, learned_sites, load_dictionary, recovery
    from forge_plugins_interp.session import open_session

    def say(line: str) -> None:
        click.echo(line, err=True)

    found = load_dictionary(dictionary, obj.catalog, say)
    known_site, known_reads = learned_sites(dictionary, say)
    site, reads = site or known_site, reads or known_reads
    if not site:
        raise ConfigError(f"--site: {dictionary} does not say where it stands in; name the site")
    if found.predicts() and not reads:
        raise ConfigError(f"--reads: {dictionary} does not say what it reads; name the site")
    what = "transcoder" if found.predicts() else "autoencoder"
    data, others = settings_of("data", overrides)
    with open_session(run, others, catalog=obj.catalog, log=say) as session:
        splice = Splice(site, dictionary=found, reads=reads)
        result = recovery(session, splice, session.open_data(data), samples)
    if as_json:
        told = Recovered(
            loss=result.original,
            loss_with_dictionary=result.spliced,
            loss_with_zeros=result.ablated,
            recovered=result.recovered,
            kl=result.kl,
        )
        print_json(told)
        return
    print(f"loss {result.original:.4f}, with the {what} {result.spliced:.4f}, with zeros {result.ablated:.4f}")
    print(f"recovered {result.recovered:.4f}, KL {result.kl:.4f} nats a token")


@autoencoder.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["saelens", "sparsify"]), required=True, help="Whose files.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new folder.")
@click.pass_obj
def export(obj: Any, run: Path, form: str, out: Path) -> None:
    """Write the autoencoder of RUN, a run's directory or a checkpoint's, as SAELens or sparsify read it."""
    from forge_core.checkpoint.contents import model_problem
    from forge_core.checkpoint.store import find_checkpoint
    from forge_plugins_interp.autoencoders.formats import write
    from forge_plugins_interp.autoencoders.splice import load_dictionary

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is a file or has files in it; give a folder that is empty or new")

    def say(line: str) -> None:
        click.echo(line, err=True)

    found = load_dictionary(run, obj.catalog, say)
    site = find_checkpoint(run, say, model_problem).job()["data"].get("site", "")
    write(found, out, form, site)  # type: ignore[arg-type]  # click has checked it
    print(f"wrote {out}")


@autoencoder.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A page, .html; numbers go beside it.")
@click.option("--latents", help="Their numbers, such as 3,17; by default the ones with the strongest activations.")
@click.option("--rows", type=click.IntRange(min=1), help="Of the store, at most; held-out samples come first.")
@click.option("--base", type=click.Path(path_type=Path), help="The run whose activations it has learned.")
@click.pass_obj
def features(obj: Any, run: Path, out: Path, latents: str | None, rows: int | None, base: Path | None) -> None:
    """Write a page about latents of RUN, a run's directory or a checkpoint's: how often each fires, on which tokens,
    and what it does to logits.

    Beside it are FILE.csv, with all latents, FILE.contexts.csv and FILE.logits.csv.
    """
    if out.suffix != ".html":
        raise ConfigError(f"--out {out}: must end with .html")
    refuse_no_folder(out)
    chosen = _numbers(latents)

    from forge_plugins_interp.autoencoders.dashboard import open_dashboard
    from forge_plugins_interp.autoencoders.feature_page import features_page
    from forge_plugins_interp.autoencoders.features_config import FeaturesConfig

    def say(line: str) -> None:
        click.echo(line, err=True)

    config = FeaturesConfig() if rows is None else FeaturesConfig(rows=rows)
    found = open_dashboard(run, config, chosen=chosen, base=base, catalog=obj.catalog, log=say)
    tables = {".csv": found.features.latent_rows(), ".contexts.csv": found.context_rows()}
    with writing(out):
        out.write_text(features_page(found, f"Latents of {run}"), encoding="utf-8")
        for ending, table in {**tables, ".logits.csv": found.logit_rows()}.items():
            if table:
                write_csv(out.with_suffix(ending), table)
    for note in found.notes:
        say(f"note: {note}")
    print(f"wrote {out}: {len(found.features.latents)} of {len(found.features.density):,} latents")


def _numbers(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--latents {text}: must be numbers with commas between them, such as 3,17") from None
