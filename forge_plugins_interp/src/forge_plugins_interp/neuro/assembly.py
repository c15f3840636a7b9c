"""Stores in the formats of other tools: NumPy, HDF5, Parquet, and assemblies as Brain-Score reads them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_core.checkpoint.fsync import make_folder
from forge_core.errors import ConfigError
from forge_plugins_interp.store import Store


def export_store(store: Store, form: str, out: Path, log: Callable[[str], None]) -> None:
    """Write the values of all sites, with the index of samples.

    ===========  ===============================================================================================
    ``npz``      one file: an array a site, and ``stimulus_id``, ``length`` and other columns
    ``npy``      a folder: ``<site>.npy``, and ``index.csv``
    ``hdf5``     one file: a dataset a site, and one a column
    ``netcdf``   one file: an assembly of BrainIO, ``presentation × neuroid``, with ``stimulus_id``, ``layer`` and
                 ``neuroid_id``; and ``<out>.stimuli.csv``
    ``parquet``  one file: a row a sample, a list a site
    ===========  ===============================================================================================

    bf16 becomes fp32, which is said.

    Raises:
        ConfigError: the format needs a row for each sample, or a package that is not installed.
    """
    arrays = {site: _array(store, site, log) for site in store.sites}
    if form in ("netcdf", "parquet"):
        for site in store.sites:
            if store.manifest.sites[site].dims[0] != "sample":
                raise ConfigError(
                    f"--format {form}: needs a row a sample, and {site} has a row a token; use npz or hdf5"
                )
    try:
        WRITERS[form](store, arrays, out)
    except ImportError as error:
        raise ConfigError(f"--format {form} needs {error.name}: pip install forge-plugins-interp[neuro]") from None


def _array(store: Store, site: str, log: Callable[[str], None]) -> np.ndarray:
    values = store.array(site)
    if values.dtype == torch.bfloat16:
        log(f"{site}: bf16 is written as fp32")
        values = values.float()
    return np.asarray(values.numpy())


def _npz(store: Store, arrays: Mapping[str, np.ndarray], out: Path) -> None:
    with out.open("wb") as file:
        np.savez(file, allow_pickle=False, **{**store.columns, **arrays})


def _npy(store: Store, arrays: Mapping[str, np.ndarray], out: Path) -> None:
    make_folder(out)
    for site, values in arrays.items():
        np.save(out / f"{site}.npy", values, allow_pickle=False)
    _write_index(store, out / "index.csv")


def _write_index(store: Store, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(store.columns)
        writer.writerows(zip(*(column.tolist() for column in store.columns.values()), strict=True))


def _hdf5(store: Store, arrays: Mapping[str, np.ndarray], out: Path) -> None:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(out, "w") as file:
        for name, values in {**store.columns, **arrays}.items():
            file[name] = np.char.encode(values, "utf-8") if values.dtype.kind == "U" else values


def _netcdf(store: Store, arrays: Mapping[str, np.ndarray], out: Path) -> None:
    import xarray

    flat = {site: values.reshape(len(values), -1) for site, values in arrays.items()}
    layers = np.concatenate([np.repeat(site, values.shape[1]) for site, values in flat.items()])
    neuroids = np.concatenate(
        [np.char.add(f"{site}.", np.arange(one.shape[1]).astype(str)) for site, one in flat.items()]
    )
    run, step = (store.manifest.origin.get(key) for key in ("run", "step"))
    columns = {name: ("presentation", _column(values)) for name, values in store.columns.items()}
    data: Any = xarray.DataArray(
        np.concatenate(list(flat.values()), axis=1),
        dims=("presentation", "neuroid"),
        coords={**columns, "layer": ("neuroid", layers), "neuroid_id": ("neuroid", neuroids)},
        name="activations",
        attrs={"identifier": f"{run}-step{step}", "stimulus_set_identifier": str(store.manifest.origin.get("data"))},
    )
    data.to_netcdf(out, engine="h5netcdf")
    _write_index(store, out.with_name(f"{out.name}.stimuli.csv"))


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(object) if values.dtype.kind == "U" else values


def _parquet(store: Store, arrays: Mapping[str, np.ndarray], out: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    columns = {name: values.tolist() for name, values in store.columns.items()}
    lists = {site: list(values.reshape(len(values), -1)) for site, values in arrays.items()}
    parquet.write_table(pyarrow.table({**columns, **lists}), out)


WRITERS: Mapping[str, Callable[[Store, Mapping[str, np.ndarray], Path], None]] = {
    "hdf5": _hdf5,
    "netcdf": _netcdf,
    "npy": _npy,
    "npz": _npz,
    "parquet": _parquet,
}
