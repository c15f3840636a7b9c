"""Recordings: responses of neuroids (neurons, sites, voxels) to stimuli, by ``stimulus_id``."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.alignment import refuse_repeated


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

    @property
    def mean(self) -> torch.Tensor:
        """``(n, q)``, over repetitions."""
        return self.repetitions.mean(1)

    def of(self, numbers: np.ndarray) -> Recordings:
        """Those of some stimuli, by their numbers."""
        groups = None if self.groups is None else self.groups[numbers]
        return Recordings(self.ids[numbers], self.repetitions[torch.from_numpy(numbers)], self.neuroids, groups)

    @classmethod
    def checked(cls, path: Path, ids: Any, values: Any, neuroids: Any = None, groups: Any = None) -> Recordings:
        """
        Args:
            values: ``(n, q)`` or ``(n, r, q)``.

        Raises:
            ConfigError: sizes do not fit, an id is there twice, a value is not finite, or a neuroid is constant.
        """
        ids, array = np.asarray(ids).astype(str), np.asarray(values, dtype=np.float64)
        array = array[:, None] if array.ndim == 2 else array
        if array.ndim != 3 or len(array) != len(ids):
            raise ConfigError(
                f"{path}: values must be (stimuli, neuroids) or (stimuli, repetitions, neuroids); they are "
                f"{np.asarray(values).shape}, and there are {len(ids)} ids"
            )
        refuse_repeated(path, ids)
        names = np.arange(array.shape[2]).astype(str) if neuroids is None else np.asarray(neuroids).astype(str)
        if not np.isfinite(array).all():
            stimulus, _, neuroid = np.argwhere(~np.isfinite(array))[0]
            raise ConfigError(f"{path}: stimulus {ids[stimulus]} has no finite value for neuroid {names[neuroid]}")
        constant = np.ptp(array.mean(1), axis=0) == 0
        if constant.any():
            raise ConfigError(f"{path}: neuroid {names[constant.argmax()]} is the same for all stimuli; leave it out")
        of_groups = None if groups is None else np.asarray(groups).astype(str)
        return cls(ids, torch.from_numpy(array), names, of_groups)


def read_recordings(path: Path) -> Recordings:
    """Read a file by its ending.

    ==========  ==========================================================================================
    ``.npz``    ``stimulus_id`` ``(n,)``, ``values`` ``(n, q)`` or ``(n, r, q)``; optionally ``neuroid_id``, ``group``
    ``.h5``     datasets of the same names
    ``.csv``    columns ``stimulus_id``, optionally ``repetition`` and ``group``; every other one is a neuroid
    ``.nc``     an assembly of BrainIO: ``presentation × neuroid``, with ``stimulus_id`` and ``neuroid_id``; a
                stimulus that is presented several times has repetitions
    ==========  ==========================================================================================

    Raises:
        ConfigError: the file cannot be read, or is not laid out so.
    """
    if path.suffix not in _READERS:
        raise ConfigError(f"{path}: recordings must end with {', '.join(_READERS)}")
    try:
        found = _READERS[path.suffix](path)
    except ImportError as error:
        raise ConfigError(f"{path} needs {error.name}: pip install forge-plugins-interp[neuro]") from None
    except KeyError as error:
        raise ConfigError(f"{path}: has no {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return Recordings.checked(path, **found)


def _npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return _named(file)


def _h5(path: Path) -> dict[str, Any]:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path) as file:
        return _named({name: _text(file[name][()]) for name in file})


def _named(file: Mapping[str, Any]) -> dict[str, Any]:
    found = {"ids": file["stimulus_id"], "values": file["values"]}
    optional = {"neuroids": "neuroid_id", "groups": "group"}
    return found | {key: file[name] for key, name in optional.items() if name in file}


def _text(values: Any) -> Any:
    return np.char.decode(values.astype(bytes), "utf-8") if values.dtype.kind in "OS" else values


def _csv(path: Path) -> dict[str, Any]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ConfigError(f"{path}: it has no rows")
    names = [name for name in rows[0] if name not in ("stimulus_id", "repetition", "group")]
    values = np.array([[float(row[name]) if row[name] else np.nan for name in names] for row in rows])
    ids = np.array([row["stimulus_id"] for row in rows])
    groups = np.array([row["group"] for row in rows]) if "group" in rows[0] else None
    return _by_stimulus(path, ids, values, names, groups, has_repetitions="repetition" in rows[0])


def _nc(path: Path) -> dict[str, Any]:
    import xarray

    with xarray.open_dataset(path) as data:
        array = next(iter(data.data_vars.values())).squeeze()
        if set(array.dims) != {"presentation", "neuroid"}:
            raise ConfigError(f"{path}: must have the dimensions presentation and neuroid, and has {array.dims}")
        array = array.transpose("presentation", "neuroid")
        names = data["neuroid_id"].values if "neuroid_id" in data else None
        groups = data["group"].values.astype(str) if "group" in data else None
        ids = data["stimulus_id"].values.astype(str)
        return _by_stimulus(path, ids, array.values, names, groups, has_repetitions=len(set(ids)) < len(ids))


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
    return {
        "ids": unique,
        "values": values[order],
        "neuroids": names,
        "groups": None if groups is None else groups[first],
    }


_READERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {".npz": _npz, ".h5": _h5, ".csv": _csv, ".nc": _nc}
