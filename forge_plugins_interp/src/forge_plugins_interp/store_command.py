"""``forge store``: stores of activations for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError
from forge_plugins_interp.out_option import look_at_out, refuse_no_folder, save_results


@attrs.frozen(kw_only=True)
class SiteSpectrum:
    """How the variance of a site spreads over its principal components."""

    site: str
    features: int
    rows: int
    """Samples, or their tokens."""
    dimensions: float
    """The participation ratio."""
    components_90: int
    """Components that have 90 % of the variance."""
    exponent: float | None
    """α of variance ~ rank^−α over ``--ranks``; null where there are fewer than three."""


@attrs.frozen(kw_only=True)
class Spectra:
    """The spectra of the sites of a store."""

    first_rank: int
    last_rank: int
    """Of the components that exponents are fitted to."""
    sites: Sequence[SiteSpectrum]


@click.group()
def store() -> None:
    """Stores that forge extract has written."""


@store.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["npz", "npy", "hdf5", "netcdf", "parquet", "zarr", "mat"]),
    required=True,
    help="netcdf is an assembly as Brain-Score reads it.",
)
@click.option("--sites", "patterns", default="*", help="Names with commas, or patterns; by default all.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="A new file; of npy and zarr, a new folder."
)
def export(folder: Path, form: str, patterns: str, out: Path) -> None:
    """Write the store FOLDER in another format."""
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; give a new name")
    refuse_no_folder(out)

    from forge_plugins_interp.store import Store
    from forge_plugins_interp.store_export import export_store

    store = Store(folder)
    export_store(store, store.chosen(patterns), form, out, lambda line: click.echo(line, err=True))
    print(f"wrote {out}")


@store.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--sites", "patterns", default="*", help="Names with commas, or patterns; by default all.")
@click.option(
    "--ranks",
    default="10-500",
    show_default=True,
    metavar="FIRST-LAST",
    help="Components that exponents are fitted to.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(Spectra)
def spectrum(folder: Path, patterns: str, ranks: str, out: Path | None, as_json: bool) -> None:
    """Say how the variance of each site of the store FOLDER spreads over principal components."""
    look_at_out(out)
    first, last = _ranks(ranks)

    from forge_core.commands.table import aligned
    from forge_plugins_interp.figures.spectrum import spectra_figure
    from forge_plugins_interp.spectrum import spectrum_of
    from forge_plugins_interp.store import Store

    store = Store(folder)
    spectra = {site: spectrum_of(store.shards(site), site) for site in store.chosen(patterns)}
    told = [
        SiteSpectrum(
            site=site,
            features=len(one.variances),
            rows=one.rows,
            dimensions=one.dimensions,
            components_90=one.components_for(0.9),
            exponent=one.exponent(first, last),
        )
        for site, one in spectra.items()
    ]
    if as_json:
        print_json(Spectra(first_rank=first, last_rank=last, sites=told))
    else:
        head = ("site", "features", "dimensions", "for 90 %", f"exponent of {ranks}")
        lines = [
            (one.site, str(one.features), f"{one.dimensions:.1f}", str(one.components_90), _exponent(one.exponent))
            for one in told
        ]
        print("\n".join(aligned([head, *lines])))
    rows = [
        {"site": site, "component": rank, "variance": float(variance)}
        for site, one in spectra.items()
        for rank, variance in enumerate(one.variances[: one.rows - 1], 1)
    ]
    save_results(out, rows, lambda: spectra_figure(spectra), as_json=as_json)


def _exponent(value: float | None) -> str:
    return "too few components" if value is None else f"{value:.2f}"


def _ranks(text: str) -> tuple[int, int]:
    first, separator, last = text.partition("-")
    if not (separator and first.isdecimal() and last.isdecimal() and 1 <= int(first) < int(last)):
        raise ConfigError(f"--ranks {text}: must be two numbers from 1 on, the smaller one first, such as 10-500")
    return int(first), int(last)
