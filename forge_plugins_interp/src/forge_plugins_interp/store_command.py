"""``forge store``: stores of activations for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from forge_core.errors import ConfigError


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
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} is not there")

    from forge_plugins_interp.store import Store
    from forge_plugins_interp.store_export import export_store

    store = Store(folder)
    export_store(store, store.chosen(patterns), form, out, lambda line: click.echo(line, err=True))
    print(f"wrote {out}")
