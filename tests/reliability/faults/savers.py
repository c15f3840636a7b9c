"""The saver, and ways to get it wrong that a test must notice. Each is applied to the process that calls it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from forge_core.checkpoint import saver as saver_file
from forge_core.checkpoint import store as store_file
from forge_core.checkpoint.fsync import flush, write_durably
from forge_core.checkpoint.manifest import Manifest, describe_files, write_manifest
from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore


def _no_file_flush() -> None:
    saver_file.FileSystemWriter = functools.partial(FileSystemWriter, sync_files=False)
    saver_file.flush_tree = _flush_folders
    saver_file.write_durably = lambda path, text: path.write_text(text)
    saver_file.write_manifest = _write_manifest_only


def _no_folder_flush() -> None:
    def flush_files(folder: Path, but: Collection[str]) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                flush(path)

    saver_file.flush_tree = flush_files
    saver_file.flush = store_file.flush = lambda path: None


def _overwrite_in_place() -> None:
    def begin(self: Saver, folder: Path, n_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
        if (folder / "tokenizer").exists():
            (folder / "tokenizer").rmdir()

    in_place = "step_00000001"
    CheckpointStore.folder = lambda self, step: self.path / in_place  # type: ignore[method-assign]
    CheckpointStore.unfinished_folder = lambda self, step, attempt: self.path / in_place  # type: ignore[method-assign]
    CheckpointStore.commit = lambda self, unfinished, step: flush(self.path)  # type: ignore[method-assign]
    Saver._begin = begin  # type: ignore[method-assign]


def _manifest_first() -> None:
    def commit(self: Saver, snapshot: Snapshot, folder: Path, files: dict[str, dict[str, object]]) -> None:
        snapshot.write_more(folder)
        write_durably(folder / "state.json", f'{{"step": {snapshot.step}}}')
        final = self._store.folder(snapshot.step)
        final.mkdir()
        everything = sorted(file for file in folder.rglob("*") if file.is_file())
        write_manifest(
            final,
            Manifest(
                step=snapshot.step,
                tokens=snapshot.tokens,
                mesh=dict(snapshot.mesh),
                versions={},
                files=describe_files(folder, everything),
                written="",
            ),
        )
        for file in everything:
            (final / file.relative_to(folder)).parent.mkdir(exist_ok=True)
            (final / file.relative_to(folder)).write_bytes(file.read_bytes())
            flush(final / file.relative_to(folder))

    Saver._commit = commit  # type: ignore[method-assign]


def _flush_folders(folder: Path, but: Collection[str]) -> None:
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            flush(path)


def _write_manifest_only(folder: Path, manifest: Manifest) -> None:
    unflushed = os.fsync
    os.fsync = lambda handle: None
    try:
        write_manifest(folder, manifest)
    finally:
        os.fsync = unflushed


SAVERS: dict[str, Callable[[], None]] = {
    "sound": lambda: None,
    "no file flush": _no_file_flush,
    "no folder flush": _no_folder_flush,
    "overwrite in place": _overwrite_in_place,
    "manifest first": _manifest_first,
}
