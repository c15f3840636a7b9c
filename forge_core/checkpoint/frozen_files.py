"""Files of frozen tensors, which the checkpoints of a run share: they are on the disk once."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
from torch.distributed.checkpoint.metadata import Metadata

from forge_core.checkpoint.contents import read_state
from forge_core.checkpoint.manifest import DamagedError, read_manifest
from forge_core.checkpoint.safe_reader import read_description, unpickled
from forge_core.errors import ConfigError

FOLDER = "frozen"
"""The folder of these files within a checkpoint."""
_METADATA = ".metadata"


@attrs.frozen
class _Shared:
    """Files of a checkpoint before, and their description there."""

    tensors: Metadata
    entries: Mapping[str, Mapping[str, Any]]
    """Their entries in its manifest."""


class FrozenFiles:
    """Gives each checkpoint names of its own for the files of one before it (hard links): any of them can be removed,
    moved, copied and read without the others. Rank 0 calls it.

    Args:
        place: the folder of checkpoints.
        known: a whole checkpoint that this run goes on from.
    """

    def __init__(self, place: Path, known: Path | None = None) -> None:
        self._place = place
        self._known = [] if known is None else [known]
        self._links = place / f".step_links.{uuid.uuid4().hex[:12]}"  # removed by the next start, as all .step_* are
        self._shared: _Shared | None = None

    def take(self, keys: Collection[str], modules: Mapping[str, int]) -> bool:
        """Link the files of the newest checkpoint that has just these tensors as frozen ones.

        Args:
            modules: versions of the model's modules; those of others may have stored other values.

        Returns:
            Whether there is one. Otherwise the tensors have to be written.
        """
        shutil.rmtree(self._links, ignore_errors=True)
        self._shared = None
        for folder in reversed(self._known):
            with suppress(OSError, DamagedError):  # it has been removed or put aside, or the disk has no links
                self._shared = self._shared or self._link(folder, keys, modules)
        return self._shared is not None

    def put(self, folder: Path) -> None:
        """Move what was taken into a checkpoint that is being written."""
        if self._shared is not None:
            self._links.rename(folder / FOLDER)

    def describe(self, folder: Path) -> dict[str, Mapping[str, Any]]:
        """Add frozen tensors to the description of the others, which have been written. Returns entries of a manifest
        for files that were taken."""
        if self._shared is not None:
            tensors, entries = self._shared.tensors, dict(self._shared.entries)
        elif (file := folder / FOLDER / _METADATA).exists():
            tensors, entries = _within(unpickled(file)), {}
            file.unlink()
        else:
            return {}
        others = unpickled(folder / _METADATA)
        joined = {
            name: {**getattr(others, name), **getattr(tensors, name)}
            for name in ("state_dict_metadata", "planner_data", "storage_data")
        }
        (folder / _METADATA).write_bytes(pickle.dumps(dataclasses.replace(others, **joined)))
        return entries

    def committed(self, folder: Path) -> None:
        """Remember a checkpoint whose files later ones may take."""
        self._shared = None
        self._known = [one for one in self._known if one.exists()]
        if (folder / FOLDER).exists():
            self._known.append(folder)

    def _link(self, folder: Path, keys: Collection[str], modules: Mapping[str, int]) -> _Shared | None:
        manifest, description = read_manifest(folder), read_description(folder)
        places = {
            index: one
            for index, one in description.storage_data.items()
            if PurePosixPath(one.relative_path).parent == PurePosixPath(FOLDER)
        }
        if {index.fqn for index in places} != set(keys) or read_state(folder).get("modules", {}) != modules:
            return None
        names = {one.relative_path for one in places.values()}
        self._links.mkdir(parents=True)
        for name in names:
            os.link(folder / name, self._links / PurePosixPath(name).name, follow_symlinks=False)
        tensors = dataclasses.replace(
            description,
            state_dict_metadata={key: description.state_dict_metadata[key] for key in keys},
            planner_data={key: one for key, one in (description.planner_data or {}).items() if key in keys},
            storage_data=places,
        )
        return _Shared(tensors, {name: manifest.files[name] for name in names})


def refuse_without_links(place: Path) -> None:
    """
    Raises:
        ConfigError: the disk of ``place``, or of the nearest folder above it that exists, cannot link files.
    """
    place = next((one for one in (place, *place.parents) if one.is_dir()), place)
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".forge-links-") as folder:
            (Path(folder) / "file").touch()
            os.link(Path(folder) / "file", Path(folder) / "link")
    except OSError as error:
        raise ConfigError(
            f'checkpoint.frozen: "once" lets checkpoints share files by hard links, which {place} does not take '
            f'({error.strerror}); set it to "whole"'
        ) from error


def _within(description: Metadata) -> Metadata:
    """The description of what is in ``FOLDER``, by paths from the folder above."""
    places = {
        index: dataclasses.replace(one, relative_path=f"{FOLDER}/{one.relative_path}")
        for index, one in description.storage_data.items()
    }
    return dataclasses.replace(description, storage_data=places)
