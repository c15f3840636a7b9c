"""Writing a checkpoint without a run: what a command makes of another one, a tensor at a time."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from forge_core.checkpoint.file_system import NamingFileSystem
from forge_core.checkpoint.fsync import flush, flush_tree
from forge_core.checkpoint.manifest import lack_of_room, write_manifest
from forge_core.checkpoint.saver import Snapshot
from forge_core.errors import ConfigError, ForgeError, SaveError
from forge_core.registry.catalog import Catalog


def write_checkpoint(
    folder: Path,
    shapes: Mapping[str, torch.Tensor],
    make: Callable[[str], torch.Tensor],
    *,
    state: Mapping[str, Any],
    step: int,
    tokens: int,
    versions: Mapping[str, str],
    write_more: Callable[[Path], object],
) -> None:
    """Write a checkpoint that any layout can read. It is whole, or it is not there.

    Args:
        folder: which is not there yet.
        shapes: on meta, by key (``model.…``).
        make: gives the tensor of a key, on the CPU. It is called once for each, in the order of ``shapes``; two of them
            are in memory at a time at most.
        state: JSON values, as a run saves them.
        versions: as ``versions_of`` gives them.
        write_more: called with the folder, for files to go with it (``job.toml``, ``tokenizer/``).

    Raises:
        ConfigError: there is something at ``folder``, or its disk has too little room; nothing has been written.
        SaveError: it cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another place, or remove it")
    unfinished = folder.with_name(f".{folder.name}.partial")
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        if lack := lack_of_room(folder.parent, n_bytes):
            raise ConfigError(lack)
        unfinished.mkdir(parents=True)
        described = _write_tensors(unfinished, shapes, make)
        tensors = {file.name: entry for file, entry in described.items()}
        write_more(unfinished)
        facts = Snapshot(step=step, tokens=tokens, state=state, versions=versions)
        manifest = facts.describe(unfinished, tensors)
        flush_tree(unfinished, tensors)
        write_manifest(unfinished, manifest)
        flush(unfinished)
        unfinished.rename(folder)
        flush(folder.parent)
    except OSError as error:
        raise SaveError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def versions_of(catalog: Catalog) -> dict[str, str]:
    """The versions of Forge, torch, and every plugin, by distribution."""
    plugins = {plugin.distribution: plugin.version for plugin in catalog.plugins if plugin.status == "ok"}
    return {"forge-core": version("forge-core"), "torch": str(torch.__version__), **plugins}


def _write_tensors(
    folder: Path, shapes: Mapping[str, torch.Tensor], make: Callable[[str], torch.Tensor]
) -> Mapping[Path, dict[str, Any]]:
    """Returns the entry of each file in the manifest."""
    # a file a tensor: torch keeps all tensors of one file until it is written
    writer = FileSystemWriter(folder, single_file_per_rank=False, sync_files=False, per_thread_copy_ahead=0)
    with ThreadPoolExecutor(1, "forge-flush") as beside, warnings.catch_warnings():
        writer.fs = files = _FlushingFileSystem(beside)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        try:
            save(dict(shapes), storage_writer=writer, planner=_MakingPlanner(make), no_dist=True)
        except CheckpointException as error:
            (cause, _), *_ = error.failures.values()
            if isinstance(cause, (ForgeError, OSError)) or not isinstance(cause, Exception):
                raise cause from error
            raise SaveError(f"cannot write to {folder}: {type(cause).__name__}: {cause}") from error
        for flushed in files.flushed.values():
            flushed.result()
        return {file: files.written[file] for file in files.flushed}


class _FlushingFileSystem(NamingFileSystem):
    """Files of tensors are flushed while the next ones are written."""

    def __init__(self, beside: Executor) -> None:
        super().__init__()
        self._beside = beside
        self.flushed: dict[Path, Future[None]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            yield stream
        if (file := Path(path)).suffix == DEFAULT_SUFFIX:  # torch renames the others when they are written
            self.flushed[file] = self._beside.submit(flush, file)


class _MakingPlanner(DefaultSavePlanner):
    """Tensors are described by what is on meta, and made when they are written."""

    def __init__(self, make: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        key = write_item.index.fqn
        made, expected = self._make(key), self.lookup_object(write_item.index)
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype), f"{key} is not what was described"
        return made
