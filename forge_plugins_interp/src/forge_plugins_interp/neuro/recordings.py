"""Recordings: responses of neuroids (neurons, sites, voxels) to stimuli, by ``stimulus_id``."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_interp.alignment import refuse_repeated
from forge_plugins_interp.tidy_table import read_csv


@attrs.frozen(eq=False)
class Recordings:
    """Responses to n stimuli, each shown r times."""

    ids: np.ndarray
    """``(n,)`` str."""
    repetitions: torch.Tensor
    """``(n, r, q)`` float64."""
    neuroids: np.ndarray
    """``(q,)`` str."""
    groups: np.ndarray | None = None
    """``(n,)`` str: stimuli of one group, such as a story, are not split between training and test."""
    subjects: np.ndarray | None = None
    """``(q,)`` str: whose neuroid it is."""

    @property
    def mean(self) -> torch.Tensor:
        """``(n, q)``, over repetitions."""
        return self.repetitions.mean(1)

    def of(self, numbers: np.ndarray) -> Recordings:
        """Those of some stimuli, by their numbers."""
        groups = None if self.groups is None else self.groups[numbers]
        values = self.repetitions[torch.from_numpy(numbers)]
        return Recordings(self.ids[numbers], values, self.neuroids, groups, self.subjects)

    @classmethod
    def checked(
        cls, path: Path, ids: Any, values: Any, neuroids: Any = None, groups: Any = None, subjects: Any = None
    ) -> Recordings:
        """
        Args:
            values: ``(n, q)`` or ``(n, r, q)``.

        Raises:
            ConfigError: values are no real numbers, sizes do not fit, an id is there twice, a value is not finite, or a
                neuroid is constant.
        """
        if np.asarray(values).dtype.kind not in "biuf":
            raise ConfigError(f"{path}: values must be real numbers, and are {np.asarray(values).dtype}")
        ids, array = np.asarray(ids).astype(str), np.asarray(values, dtype=np.float64)
        array = array[:, None] if array.ndim == 2 else array
        if array.ndim != 3 or len(array) != len(ids):
            raise ConfigError(
                f"{path}: values must be (stimuli, neuroids) or (stimuli, repetitions, neuroids); they are "
                f"{np.asarray(values).shape}, and there are {len(ids)} ids"
            )
        if not array.size:
            raise ConfigError(f"{path}: values has the shape {np.asarray(values).shape}, in which there are none")
        refuse_repeated(path, ids)
        names = np.arange(array.shape[2]).astype(str) if neuroids is None else np.asarray(neuroids).astype(str)
        of_groups, of_subjects = (None if one is None else np.asarray(one).astype(str) for one in (groups, subjects))
        facts = {"neuroid_id": (names, array.shape[2], "neuroids"), "group": (of_groups, len(ids), "stimuli")}
        facts["subject"] = (of_subjects, array.shape[2], "neuroids")
        for key, (found, number, of) in facts.items():
            if found is not None and found.shape != (number,):
                raise ConfigError(f"{path}: {key} has {found.size} values, and there are {number} {of}")
        if not np.isfinite(array).all():
            stimulus, _, neuroid = np.argwhere(~np.isfinite(array))[0]
            raise ConfigError(f"{path}: stimulus {ids[stimulus]} has no finite value for neuroid {names[neuroid]}")
        constant = np.ptp(array.mean(1), axis=0) == 0
        if constant.any():
            raise ConfigError(f"{path}: neuroid {names[constant.argmax()]} is the same for all stimuli; leave it out")
        return cls(ids, torch.from_numpy(array), names, of_groups, of_subjects)


def read_recordings(path: Path) -> Recordings:
    """Read a file by its ending.

    ==========  ==========================================================================================
    ``.npz``    ``stimulus_id`` ``(n,)``, ``values`` ``(n, q)`` or ``(n, r, q)``; optionally ``neuroid_id``,
                ``group`` ``(n,)``, ``subject`` ``(q,)``
    ``.h5``     datasets of the same names
    ``.mat``    variables of the same names, of MATLAB up to 7.2; names are cells of texts, characters or numbers
    ``.csv``    columns ``stimulus_id``, optionally ``repetition`` and ``group``; every other one is a neuroid
    ``.nc``     an assembly of BrainIO: ``presentation × neuroid``, with ``stimulus_id``, ``neuroid_id``, ``subject``; a
                stimulus that is presented several times has repetitions
    ``.nwb``    ``trials`` with ``stimulus_id``, optionally ``group``, and ``units`` with spike times: spikes per
                second from ``start_time`` to before ``stop_time``; trials of one stimulus are its repetitions
    ==========  ==========================================================================================

    Raises:
        ConfigError: the file cannot be read, or is not laid out so.
    """
    if path.suffix not in _READERS:
        raise ConfigError(f"{path}: recordings must end with {', '.join(_READERS)}")
    try:
        found = _READERS[path.suffix](path)
    except ImportError as error:
        extra = "nwb" if path.suffix == ".nwb" else "neuro"
        raise ConfigError(f"{path} needs {error.name}: pip install 'forge-plugins-interp[{extra}]'") from None
    except KeyError as error:
        raise ConfigError(f"{path}: has no {error}") from error
    except (OSError, ValueError, csv.Error, BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return Recordings.checked(path, **found)


def _npz(path: Path) -> dict[str, Any]:
    # opened here: NumPy leaves a damaged file open
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return _named(file)


def _h5(path: Path) -> dict[str, Any]:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path) as file:
        return _named({name: _text(file[name][()]) for name in file})


_OPTIONAL = {"neuroids": "neuroid_id", "groups": "group", "subjects": "subject"}


def _named(file: Mapping[str, Any]) -> dict[str, Any]:
    found = {"ids": file["stimulus_id"], "values": file["values"]}
    return found | {key: file[name] for key, name in _OPTIONAL.items() if name in file}


def _text(values: Any) -> Any:
    return np.char.decode(values.astype(bytes), "utf-8") if values.dtype.kind in "OS" else values


def _mat(path: Path) -> dict[str, Any]:
    from scipy import io  # type: ignore[import-untyped]

    try:
        file = io.loadmat(path)
    except NotImplementedError:
        raise ConfigError(f"{path}: is a file of MATLAB 7.3; save it with the option -v7, or as .h5") from None
    except Exception as error:  # SciPy has no one kind for damaged files
        raise ValueError(f"{type(error).__name__}: {error}") from error
    # other variables may be of any kind
    texts = {name: _mat_texts(file[name]) for name in ("stimulus_id", *_OPTIONAL.values()) if name in file}
    found = _named({"values": file["values"], **texts})
    values = found["values"]
    if not isinstance(values, np.ndarray):  # sparse
        values = values.toarray()
    if values.ndim == 2 and values.shape[1] > len(found.get("neuroids", values[0])) == 1:
        values = values[:, :, None]  # MATLAB drops a last dimension of 1
    return {**found, "values": values}


def _mat_texts(values: np.ndarray) -> np.ndarray:
    """Cells, rows of characters or numbers as texts ``(n,)``; a whole number without a point."""
    cells = [np.ravel(cell) for cell in values.ravel()]
    firsts = [cell[0] if cell.size else "" for cell in cells]
    whole = (int(one) if isinstance(one, float | np.floating) and one.is_integer() else one for one in firsts)
    return np.array([str(one).rstrip() for one in whole])


def _csv(path: Path) -> dict[str, Any]:
    rows = read_csv(path)
    if not rows:
        raise ConfigError(f"{path}: it has no rows")
    if "stimulus_id" not in rows[0]:
        hint = nearest_hint("stimulus_id", rows[0])
        raise ConfigError(f"{path}: has no 'stimulus_id'; it has {', '.join(rows[0])}{hint}")
    names = [name for name in rows[0] if name not in ("stimulus_id", "repetition", "group")]
    values = np.array([[_number(path, line, name, row[name]) for name in names] for line, row in enumerate(rows, 2)])
    ids = np.array([row["stimulus_id"] for row in rows])
    groups = np.array([row["group"] for row in rows]) if "group" in rows[0] else None
    shown = [(row["stimulus_id"], row.get("repetition")) for row in rows]
    twice = [one for one, number in Counter(shown).items() if number > 1]
    if twice and twice[0][1] is not None:
        raise ConfigError(f"{path}: stimulus {twice[0][0]} has repetition {twice[0][1]} more than once")
    return _by_stimulus(path, ids, values, names, groups, has_repetitions="repetition" in rows[0])


def _number(path: Path, line: int, column: str, text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        raise ConfigError(f"{path}: line {line}, column {column}: {text!r} is no number") from None


def _nc(path: Path) -> dict[str, Any]:
    import xarray

    with xarray.open_dataset(path) as data:
        found = [one for one in data.data_vars.values() if {"presentation", "neuroid"} <= set(one.dims)]
        if len(found) != 1:
            raise ConfigError(
                f"{path}: an assembly has one variable of the dimensions presentation and neuroid, and this file has "
                f"{len(found)}; its variables are {', '.join(map(str, data.data_vars)) or 'none'}"
            )
        further = [dim for dim in found[0].dims if dim not in ("presentation", "neuroid")]
        for dim in further:
            if found[0].sizes[dim] > 1:
                raise ConfigError(f"{path}: the dimension {dim} has {found[0].sizes[dim]} values; choose one of them")
        array = found[0].isel(dict.fromkeys(further, 0)).transpose("presentation", "neuroid")
        names = data["neuroid_id"].values if "neuroid_id" in data else None
        groups = data["group"].values.astype(str) if "group" in data else None
        name = "image_id" if "stimulus_id" not in data and "image_id" in data else "stimulus_id"  # older assemblies
        ids = data[name].values.astype(str)
        subjects = {"subjects": data["subject"].values} if "subject" in data else {}
        several = len(set(ids)) < len(ids)
        return _by_stimulus(path, ids, array.values, names, groups, has_repetitions=several) | subjects


def _nwb(path: Path) -> dict[str, Any]:
    pynwb: Any = import_module("pynwb")  # mypy cannot see it where the extra is not installed

    with pynwb.NWBHDF5IO(str(path), "r") as io:
        file = io.read()
        for name in ("trials", "units"):
            if getattr(file, name) is None:
                raise ConfigError(f"{path}: has no table {name!r}")
        trials = file.trials
        if "stimulus_id" not in trials.colnames:
            raise ConfigError(f"{path}: trials have no 'stimulus_id'; they have {', '.join(trials.colnames)}")
        start, stop = (np.asarray(trials[name][:], dtype=np.float64) for name in ("start_time", "stop_time"))
        spikes = [np.sort(file.units.get_unit_spike_times(unit)) for unit in range(len(file.units))]
        ids = np.asarray(trials["stimulus_id"][:]).astype(str)
        groups = np.asarray(trials["group"][:]).astype(str) if "group" in trials.colnames else None
        names = np.asarray(file.units.id[:]).astype(str)
    if bool((stop <= start).any()):
        raise ConfigError(f"{path}: trial {int((stop <= start).argmax())} ends at or before its start")
    counts = np.stack([np.searchsorted(one, stop) - np.searchsorted(one, start) for one in spikes], axis=1)
    return _by_stimulus(path, ids, counts / (stop - start)[:, None], names, groups, has_repetitions=True)


def _by_stimulus(
    path: Path, ids: np.ndarray, values: np.ndarray, names: Any, groups: np.ndarray | None, *, has_repetitions: bool
) -> dict[str, Any]:
    """Rows of one stimulus become its repetitions."""
    if not has_repetitions:
        return {"ids": ids, "values": values, "neuroids": names, "groups": groups}
    unique, first, counts = np.unique(ids, return_index=True, return_counts=True)
    if len(set(counts.tolist())) > 1:
        raise ConfigError(
            f"{path}: stimulus {unique[counts.argmin()]} has {counts.min()} repetitions, and {unique[counts.argmax()]} "
            f"{counts.max()}; give all equally many"
        )
    order = np.argsort(ids, kind="stable").reshape(len(unique), -1)
    if groups is not None and len(several := np.flatnonzero((groups[order] != groups[first][:, None]).any(1))):
        raise ConfigError(f"{path}: stimulus {unique[several[0]]} has more than one group")
    return {
        "ids": unique,
        "values": values[order],
        "neuroids": names,
        "groups": None if groups is None else groups[first],
    }


_READERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    ".npz": _npz,
    ".h5": _h5,
    ".mat": _mat,
    ".csv": _csv,
    ".nc": _nc,
    ".nwb": _nwb,
}
