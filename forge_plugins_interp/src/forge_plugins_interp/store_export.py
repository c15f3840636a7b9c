"""Stores in the formats of other tools: of NumPy, HDF5, Zarr, MATLAB, Parquet, and assemblies of Brain-Score."""

from __future__ import annotations

import csv
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_core.checkpoint.manifest import as_size, lack_of_room
from forge_core.errors import ConfigError
from forge_plugins_interp.store import Store

_MAT_BYTES = 2**31 - 1
"""A matrix of MATLAB 5 has so many at most."""


def export_store(store: Store, sites: Sequence[str], form: str, out: Path, log: Callable[[str], None]) -> None:
    """Write the values of sites, with the index of samples, in one go: ``out`` is there once all of it is.

    ===========  ===============================================================================================
    ``npz``      one file: an array a site, and ``stimulus_id``, ``length`` and other columns
    ``npy``      a folder: ``<site>.npy``, and ``index.csv``
    ``hdf5``     one file: a dataset a site, and one a column
    ``netcdf``   one file: an assembly of BrainIO, ``presentation × neuroid``, with ``stimulus_id``, ``layer`` and
                 ``neuroid_id``; and ``<out>.stimuli.csv``
    ``parquet``  one file: a row a sample, or a row a token with its ``position``; a list a site
    ``zarr``     a folder: a group of Zarr 2 with an array a site, and one a column
    ``mat``      one file of MATLAB 5: a matrix a site, ``blocks_0_resid_post``, a column vector or cells a column, and
                 the cells ``sites`` with our names
    ===========  ===============================================================================================

    ``npy``, ``hdf5``, ``zarr`` and ``parquet`` have a shard in memory at a time, ``npz`` a site, ``netcdf`` and ``mat``
    all. bf16 becomes fp32, which is said.

    Raises:
        ConfigError: the format needs other rows, a package is not installed, or the disk has not enough room.
    """
    _refuse_rows(store, sites, form)
    if problem := lack_of_room(out.absolute().parent, n_bytes(store, sites), "the export"):
        raise ConfigError(f"--out: {problem}")
    for site in sites:
        if store.manifest.sites[site].dtype == "bfloat16":
            log(f"{site}: bf16 is written as fp32")
    temporary = out.with_name(f"{out.name}.new")
    _remove(temporary)
    try:
        WRITERS[form](store, sites, temporary)
    except ImportError as error:
        _remove(temporary)
        raise ConfigError(f"--format {form} needs {error.name}: pip install 'forge-plugins-interp[neuro]'") from None
    except BaseException:
        _remove(temporary)
        raise
    temporary.replace(out)
    if form == "netcdf":
        _write_index(store, out.with_name(f"{out.name}.stimuli.csv"))


def n_bytes(store: Store, sites: Sequence[str]) -> int:
    """How much the values take, bf16 as fp32."""
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in (_shape(store, site) for site in sites))


def _refuse_rows(store: Store, sites: Sequence[str], form: str) -> None:
    kinds = {store.manifest.sites[site].dims[0] for site in sites}
    if form == "netcdf" and "token" in kinds:
        (site, *_) = [site for site in sites if store.manifest.sites[site].dims[0] == "token"]
        raise ConfigError(f"--format netcdf: needs a row a sample, and {site} has a row a token; use npz or hdf5")
    if form == "parquet" and len(kinds) > 1:
        raise ConfigError("--format parquet: some sites have a row a token, and some a row a sample; choose by --sites")
    if form == "mat":
        _refuse_for_matlab(store, sites)


def _npz(store: Store, sites: Sequence[str], out: Path) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:

        def put(name: str, values: np.ndarray) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values, allow_pickle=False)

        for name, values in store.columns.items():
            put(name, values)
        for site in sites:
            put(site, _numpy(store.array(site)))


def _npy(store: Store, sites: Sequence[str], out: Path) -> None:
    out.mkdir()
    for site in sites:
        shape, dtype = _shape(store, site)
        file = np.lib.format.open_memmap(out / f"{site}.npy", mode="w+", dtype=dtype, shape=shape)
        _fill(file, store, site)
        file.flush()
    _write_index(store, out / "index.csv")


def _write_index(store: Store, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(store.columns)
        writer.writerows(zip(*(column.tolist() for column in store.columns.values()), strict=True))


def _hdf5(store: Store, sites: Sequence[str], out: Path) -> None:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(out, "w") as file:
        for name, values in store.columns.items():
            file[name] = np.char.encode(values, "utf-8") if values.dtype.kind == "U" else values
        for site in sites:
            shape, dtype = _shape(store, site)
            _fill(file.create_dataset(site, shape=shape, dtype=dtype), store, site)


def _netcdf(store: Store, sites: Sequence[str], out: Path) -> None:
    import xarray

    # NetCDF has no fp16
    flat = {site: store.array(site).float().flatten(1).numpy() for site in sites}
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


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(object) if values.dtype.kind == "U" else values


def _parquet(store: Store, sites: Sequence[str], out: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    has_tokens = store.manifest.sites[sites[0]].dims[0] == "token"
    writer = None
    for shard, parts in enumerate(zip(*(store.shards(site) for site in sites), strict=True)):
        samples = np.array(store.manifest.samples_of(shard))
        columns = {name: values[samples] for name, values in store.columns.items()}
        if has_tokens:
            lengths = columns["length"]
            columns = {name: np.repeat(values, lengths) for name, values in columns.items()}
            columns["position"] = store.shard_positions(shard).numpy()
        arrays = {name: pyarrow.array(values) for name, values in columns.items()}
        for site, part in zip(sites, parts, strict=True):
            values = _numpy(part).reshape(len(part), -1)
            arrays[site] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), values.shape[1])
        table = pyarrow.table(arrays)
        writer = writer or parquet.ParquetWriter(out, table.schema)
        writer.write_table(table)
    assert writer is not None, "a store has a shard"
    writer.close()


def _zarr(store: Store, sites: Sequence[str], out: Path) -> None:
    import zarr

    # version 2 has strings of a fixed length, and every reader knows it
    group = zarr.open_group(out, mode="w", zarr_format=2)
    for name, values in store.columns.items():
        group.create_array(name, data=values)
    for site in sites:
        shape, dtype = _shape(store, site)
        chunk = (max(1, len(next(store.shards(site)))), *shape[1:])
        _fill(group.create_array(site, shape=shape, dtype=dtype, chunks=chunk), store, site)


def _mat(store: Store, sites: Sequence[str], out: Path) -> None:
    from scipy import io  # type: ignore[import-untyped]

    # neither fp16 nor fixed-length strings are in the format
    found = {_mat_name(name): _column(values) for name, values in store.columns.items()}
    for site in sites:
        values = _numpy(store.array(site))
        found[_mat_name(site)] = values.astype(np.float32) if values.dtype == np.float16 else values
    found["sites"] = np.array(sites, dtype=object)
    with out.open("wb") as file:  # it would add an ending to a path
        io.savemat(file, found, oned_as="column")


def _mat_name(name: str) -> str:
    """A name that MATLAB can type, as its ``makeValidName`` makes them."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    return found if found[0].isalpha() else f"x{found}"


def _refuse_for_matlab(store: Store, sites: Sequence[str]) -> None:
    names = [*store.columns, *sites]
    by_name: dict[str, str] = {"sites": "the list of sites"}
    for name in names:
        if (other := by_name.setdefault(_mat_name(name), name)) != name:
            raise ConfigError(f"--format mat: {name} and {other} would both be called {_mat_name(name)}; use hdf5")
    for site in sites:
        if (size := n_bytes(store, [site])) > _MAT_BYTES:
            raise ConfigError(
                f"--format mat: {site} takes {as_size(size)}, and a matrix of MATLAB 5 {as_size(_MAT_BYTES)} at most; "
                "use hdf5"
            )


WRITERS: Mapping[str, Callable[[Store, Sequence[str], Path], None]] = {
    "hdf5": _hdf5,
    "mat": _mat,
    "netcdf": _netcdf,
    "npy": _npy,
    "npz": _npz,
    "parquet": _parquet,
    "zarr": _zarr,
}


def _shape(store: Store, site: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    stored = store.manifest.sites[site]
    rows = int(store.columns["length"].sum()) if stored.dims[0] == "token" else len(store)
    return (rows, *stored.sizes), _numpy(torch.empty(0, dtype=getattr(torch, stored.dtype))).dtype


def _fill(target: Any, store: Store, site: str) -> None:
    """``target[start:stop] = …``, as arrays of NumPy and of h5py take it."""
    start = 0
    for values in store.shards(site):
        target[start : start + len(values)] = _numpy(values)
        start += len(values)


def _numpy(values: torch.Tensor) -> np.ndarray:
    found: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return found


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
