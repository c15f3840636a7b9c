"""Reading a checkpoint that somebody else wrote: nothing in it is executed, nothing outside it is opened.

torch's reader unpickles ``.metadata`` and byte entries without restraint, follows any path, ignores extra keys, and
converts dtypes; see PyTorch issue 189308.
"""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from forge_core.checkpoint.file_system import NamingFileSystem
from forge_core.checkpoint.manifest import DamagedError, read_manifest
from forge_core.checkpoint.stored_tensor import read_part
from forge_core.errors import ConfigError, and_more

_ALLOWED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13 writes it so
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
}
"""Classes that the description of tensors is made of."""


def read_description(folder: Path) -> Metadata:
    """The description of every tensor in a checkpoint, and where its bytes lie.

    Raises:
        DamagedError: the description is not one of tensors alone, or does not fit the files that the manifest names.
    """
    try:
        metadata = unpickled(folder / ".metadata")
        _refuse_implausible(metadata, read_manifest(folder).files)
    except OSError as error:
        raise DamagedError(f".metadata cannot be read ({error.strerror})") from error
    except DamagedError:
        raise
    except Exception as error:  # anything that a hostile or broken file makes of constructors
        raise DamagedError(f".metadata is no description of tensors ({_first_line(error)})") from error
    return metadata  # type: ignore[no-any-return]  # just checked


def unpickled(file: Path) -> Any:
    """Read a description that has not been compared with any manifest yet.

    Raises:
        Exception: it is of something else than tensors.
    """
    with file.open("rb") as content:
        return _Unpickler(content).load()


def saved_tensors(description: Metadata) -> Mapping[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor in a checkpoint, by key."""
    return description.state_dict_metadata  # type: ignore[return-value]  # what is no tensor has been refused


def read_tensors(folder: Path, description: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read into the given tensors, each rank its own part. All ranks call it together.

    Raises:
        ConfigError: a key is not in the checkpoint, or with another shape or dtype. Tensors of the checkpoint that are
            not asked for are the caller's business.
        DamagedError: what is stored is not what was described; the tensors are left with part of it.
    """
    refuse_misfits(folder, description, tensors)
    with warnings.catch_warnings():
        # one process without a group, as for sampling, is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(dict(tensors), storage_reader=_Reader(folder, description), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise DamagedError(f"rank {rank} cannot read it: {_first_line(cause)}") from error


def refuse_misfits(folder: Path, description: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises as ``read_tensors`` does, and reads nothing. For ranks that must all know before they read together."""
    saved = saved_tensors(description)
    problems = [problem for key, tensor in tensors.items() if (problem := _mismatch(key, tensor, saved.get(key)))]
    if problems:
        lines = "\n  ".join(problems[:20]) + and_more(len(problems), 20, "\n  ")
        raise ConfigError(f"{folder} does not fit this model:\n  {lines}")


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, description: Metadata) -> None:
        super().__init__(folder)
        self.fs = NamingFileSystem()
        self._folder, self._description = folder, description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return dataclasses.replace(self._description, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts = [(self.storage_data[item.storage_index], item) for item in plan.items]
        parts.sort(key=lambda part: (part[0].relative_path, part[0].offset))
        for name, in_file in groupby(parts, key=lambda part: part[0].relative_path):
            with self.fs.create_stream(self._folder / name, "rb") as stream:
                for place, item in in_file:
                    target = planner.resolve_tensor(item).detach()
                    read_part(stream.fileno(), place, self._described(item.storage_index), item.storage_offsets, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _described(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor that should be stored there, on the meta device."""
        entry = saved_tensors(self._description)[index.fqn]
        assert index.index is not None, "torch counts chunks"
        return torch.empty(entry.chunks[index.index].sizes, dtype=entry.properties.dtype, device="meta")


def _refuse_implausible(metadata: object, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Every tensor must lie whole in files that the manifest names, and no two in one place: what is described then
    needs no more memory than there are bytes.

    Raises:
        DamagedError: not so.
        Exception: it is not made as a description is.
    """
    if not isinstance(metadata, Metadata):
        raise DamagedError(".metadata is no description of tensors")
    taken: Counter[str] = Counter()
    for index, record in metadata.storage_data.items():
        name = record.relative_path
        if type(name) is not str or name not in files:
            raise DamagedError(f".metadata says that {index.fqn} is in {name!r}, which the manifest does not name")
        if record.transform_descriptors is not None:
            raise DamagedError(f".metadata says that {index.fqn} is compressed or encrypted")
        taken[name] += record.length
        inside = record.offset >= 0 and record.length >= 0 and record.offset + record.length <= files[name]["bytes"]
        if not inside or taken[name] > files[name]["bytes"]:
            raise DamagedError(f".metadata says that {index.fqn} lies outside {name}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedError(f".metadata describes {key!r}, which is not a tensor and would have to be executed")
        chunks = [_numel(chunk.sizes) for chunk in entry.chunks]
        records = [metadata.storage_data.get(MetadataIndex(key, chunk.offsets)) for chunk in entry.chunks]
        itemsize = entry.properties.dtype.itemsize
        if sum(chunks) != _numel(entry.size) or any(
            n * itemsize > (record.length if record else 0) for n, record in zip(chunks, records, strict=True)
        ):
            raise DamagedError(f".metadata says that {key} has more values than are stored")


def _numel(size: torch.Size) -> int:
    if min(size, default=0) < 0:
        raise ValueError(f"a negative size, {tuple(size)}")
    return size.numel()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        found = super().find_class(module, name)
        made = _Properties if found is TensorProperties else found
        return made if isinstance(made, torch.dtype) else _stand_in(made)


class _Properties(TensorProperties):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Leave the strides out: torch 2.15 writes them last, and one before it would refuse them."""
        super().__setstate__(state[:5])  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]  # as which it is written, next to frozen tensors


class _Sealed(type):
    """A pickle can set attributes of any class it may name, and they would stay set for the whole process."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it changes {cls.__name__}")


def _stand_in(found: Any) -> type:
    """A class that makes the same objects as ``found``, and cannot be changed."""

    def make(_: type, *arguments: Any) -> Any:
        is_bare = isinstance(found, type) and dataclasses.is_dataclass(found)  # its attributes come later
        return object.__new__(found) if is_bare else found(*arguments)

    return _Sealed(found.__name__, (), {"__new__": make})


def _first_line(error: BaseException) -> str:
    """The first line of a message, cut: the writer of the file decides how long it is."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _mismatch(key: str, tensor: torch.Tensor, saved: TensorStorageMetadata | None) -> str | None:
    if saved is None:
        return f"{key} is not in the checkpoint"
    if tuple(saved.size) != tuple(tensor.shape):
        return f"{key} has shape {tuple(tensor.shape)}, in the checkpoint {tuple(saved.size)}"
    if saved.properties.dtype != tensor.dtype:
        return f"{key} has dtype {tensor.dtype}, in the checkpoint {saved.properties.dtype}"
    return None
