"""Where a run's checkpoints lie, and how one comes to be there: written aside, described by a manifest, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from forge_core.errors import ConfigError

FORMAT = 1
_LATEST = "latest"


@attrs.frozen
class Checkpoint:
    """A committed checkpoint, verified when it was opened.

    Its files: ``manifest.json``, ``state.json``, ``job.toml``, ``tokenizer/`` and those of torch DCP.
    """

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Everything that is not a tensor, as it was given to ``save``."""
        state: dict[str, Any] = json.loads((self.path / "state.json").read_text())
        return state

    def saved_tensors(self) -> Mapping[str, Any]:
        """Descriptions (shape, dtype) of the tensors, by key."""
        entries: Mapping[str, Any] = FileSystemReader(self.path).read_metadata().state_dict_metadata
        return entries

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read into the given tensors, each rank its own part.

        Raises:
            ConfigError: a key, shape or dtype is not what the checkpoint has. Tensors of the checkpoint that are not
                asked for are the caller's business.
        """
        saved = self.saved_tensors()
        problems = [problem for key, tensor in tensors.items() if (problem := _mismatch(key, tensor, saved.get(key)))]
        if problems:
            shown = "\n  ".join(problems[:20])
            raise ConfigError(f"{self.path} does not fit this model:\n  {shown}")
        with warnings.catch_warnings():
            # one process without a group, as for sampling, is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=FileSystemReader(self.path), no_dist=not dist.is_initialized())


class CheckpointStore:
    """The folder ``checkpoints/`` of a run. All ranks call ``save`` together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        write_more: Callable[[Path], None],
    ) -> Path:
        """Write a checkpoint and commit it. When this returns, on any rank, it is there.

        Args:
            tensors: by key; ``DTensor``s are written by the ranks that hold their parts.
            state: JSON values.
            write_more: called on the first rank with the folder, for files to go with it.
        """
        final = self.path / f"step_{step:08d}"
        partial = self.path / f".{final.name}.partial"
        first = dist.get_rank() == 0
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _wait_for_all()
        save(dict(tensors), storage_writer=FileSystemWriter(partial))
        if first:
            write_more(partial)
            _write_durably(partial / "state.json", json.dumps(state, indent=1))
            _write_durably(partial / "manifest.json", json.dumps(_manifest(partial, step), indent=1))
            self._commit(partial, final)
        _wait_for_all()
        return final

    def newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint; those that are not are named to ``report`` and passed over.

        Raises:
            ConfigError: there are checkpoints, and none is whole. A fresh start would write over them.
        """
        paths = sorted(self.path.glob("step_*"), reverse=True)
        problems = []
        for path in paths:
            problem = damage(path)
            if problem is None:
                return open_checkpoint(path)
            problems.append(f"checkpoint {path.name} cannot be used: {problem}")
            report(f"{problems[-1]}; trying the one before it")
        if problems:
            raise ConfigError(
                f"none of the checkpoints in {self.path} can be used:\n  " + "\n  ".join(problems) + "\n"
                "Mend or move them, or choose another run.name to start afresh."
            )
        return None

    def remove_unfinished(self) -> None:
        """What a killed process left half written. Call it on the first rank, before the first ``save``."""
        for path in self.path.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def _commit(self, partial: Path, final: Path) -> None:
        _flush_folder(partial)
        replaced = self.path / f".{final.name}.replaced"
        if final.exists():  # damaged, or it would have been resumed from
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        _flush_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        link = self.path / f".{_LATEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self.path / _LATEST)


def find_checkpoint(path: Path, report: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that ``path`` means: itself, or the newest of a run.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    if (path / "manifest.json").exists():
        return open_checkpoint(path)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; give a run's directory or a checkpoint's")
    found = CheckpointStore(path / "checkpoints").newest(report)
    if found is None:
        raise ConfigError(f"{path} holds no checkpoint; give a run's directory or a checkpoint's")
    return found


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        ConfigError: it is damaged.
    """
    problem = damage(path)
    if problem is not None:
        raise ConfigError(f"checkpoint {path} cannot be used: {problem}")
    path = path.resolve()  # not through `latest`, which may move on while we read
    return Checkpoint(path, int(json.loads((path / "manifest.json").read_text())["step"]))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, as its manifest tells, or ``None``."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = dict(manifest["files"])
    except OSError as error:
        return f"manifest.json cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        return "manifest.json is not a manifest"
    if manifest.get("format") != FORMAT:
        return f"it has format {manifest.get('format')}, this version of Forge reads format {FORMAT}"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, the manifest says {entry['bytes']}"
        if _digest(file) != entry["sha256"]:
            return f"the content of {name} is not what was written"
    return None


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        "format": FORMAT,
        "step": step,
        "files": {
            file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _digest(file)}
            for file in files
        },
    }


def _fingerprint(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": _digest(file)}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _mismatch(key: str, tensor: torch.Tensor, saved: object) -> str | None:
    if saved is None:
        return f"{key} is not in the checkpoint"
    if not isinstance(saved, TensorStorageMetadata):
        return f"{key} is not a tensor in the checkpoint"
    if tuple(saved.size) != tuple(tensor.shape):
        return f"{key} has shape {tuple(tensor.shape)}, in the checkpoint {tuple(saved.size)}"
    if saved.properties.dtype != tensor.dtype:
        return f"{key} has dtype {tensor.dtype}, in the checkpoint {saved.properties.dtype}"
    return None


def _wait_for_all() -> None:
    dist.all_reduce(torch.zeros(1))  # on the CPU, hence over gloo: nobody waits for a GPU's queue


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
