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
    type=click.Choice(["npz", "npy", "hdf5", "netcdf", "parquet"]),
    required=True,
    help="netcdf is an assembly as Brain-Score reads it.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new file; of npy, a new folder.")
def export(folder: Path, form: str, out: Path) -> None:
    """Write the store FOLDER in another format."""
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; give a new name")

    from forge_plugins_interp.neuro.assembly import export_store
    from forge_plugins_interp.store import Store

    export_store(Store(folder), form, out, lambda line: click.echo(line, err=True))
    print(f"wrote {out}")
