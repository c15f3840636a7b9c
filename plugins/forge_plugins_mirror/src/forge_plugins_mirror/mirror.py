"""A second place for a run's checkpoints, which may outlive the first: a path, or any URL that fsspec knows.

It looks like the directory of a run: ``<mirror>/<run.name>/checkpoints/``, with the ``job.toml`` of the last start, and
``writer.json``, which says who copies there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash

from forge_core.checkpoint.fsync import flush, flush_tree, write_durably
from forge_core.checkpoint.manifest import (
    FILE_NAME,
    DamagedError,
    Manifest,
    damage,
    parse_manifest,
    read_manifest,
)
from forge_core.checkpoint.store import CheckpointStore
from forge_core.errors import ForgeError, LeaseLostError, MirrorError
from forge_plugins_mirror.mirror_url import path_of

WRITER = "writer.json"
_BLOCK = 1 << 22


def open_mirror(url: str) -> Mirror:
    """The mirror of one run, whose folder ``url`` is. Nothing is asked of it yet.

    Raises:
        MirrorError: fsspec cannot use it.
    """
    path = path_of(url)
    return _Folder(path) if path is not None else _Objects(url)


class Mirror(ABC):
    """Checkpoints are copied file by file, each read back and compared with the manifest, and are there once that is
    complete: what a killed process leaves half copied is not taken for one.

    Two that write take turns: the later one to ``take_over`` has it, and the earlier one is refused from then on.

    Methods raise ``MirrorError`` if the file system fails.

    Args:
        filesystem: of fsspec.
        root: of the run, as that file system spells it.
    """

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._attempt = ""
        self._found: dict[int, tuple[str, Manifest | DamagedError]] = {}

    def checkpoints(self) -> dict[int, Manifest | DamagedError]:
        """Every one that is there, by step in ascending order: its manifest, or what is wrong with that."""
        with self._explained("list its checkpoints"):
            self._found = dict(sorted(self._committed().items()))
            return {step: found for step, (_, found) in self._found.items()}

    def job_toml(self) -> str | None:
        """Of the run's last start; ``None`` before the first."""
        with self._explained("read job.toml"):
            text = self._read(f"{self._root}/job.toml")
            return None if text is None else text.decode()

    def found(self, step: int) -> Manifest | DamagedError:
        """Of one that was listed last."""
        return self._found[step][1]

    def visible_problem(self, step: int) -> str | None:
        """What is wrong with one that was listed last, as far as names and sizes tell, or ``None``."""
        return self._first_problem(step, self._wrong_size)

    def problem(self, step: int) -> str | None:
        """What is wrong with one that was listed last, down to the last bit, or ``None``."""
        return self._first_problem(step, self._misfit)

    def fetch(self, step: int, folder: Path) -> str | None:
        """Copy one that was listed last to ``folder``, which is made, and flush it. Returns what is wrong with it."""
        with self._explained(f"fetch step {step}"):
            source, found = self._found[step]
            if isinstance(found, DamagedError):
                return str(found)
            folder.mkdir(parents=True)
            for name in found.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # which `damage` names
                    self._filesystem.get_file(f"{source}/{name}", str(folder / name))
            problem = damage(folder, found.files)
            if problem is None:
                flush_tree(folder)
                write_durably(folder / FILE_NAME, (self._read(f"{source}/{FILE_NAME}") or b"").decode())
                flush(folder)
            return problem

    def take_over(self, attempt: str, job_toml: str, keeps_until: int) -> None:
        """Called before anything is written; earlier attempts write nothing from here on. Half-copied checkpoints are
        collected; those of steps above ``keeps_until`` are put aside."""
        with self._explained("write to it"):
            self._filesystem.makedirs(f"{self._root}/checkpoints", exist_ok=True)
            writer = {"attempt": attempt, "host": socket.gethostname(), "process": os.getpid()}
            self._write(f"{self._root}/{WRITER}", json.dumps(writer))
            self._attempt = attempt
            self._put_aside(keeps_until)
            self._collect_unfinished()
            self._write(f"{self._root}/job.toml", job_toml)

    def copy(self, checkpoint: Path, may_commit: Callable[[], None]) -> Manifest:
        """Copy a committed checkpoint. What an earlier try has copied is not copied again.

        Args:
            may_commit: called before every file and right before the checkpoint is there; what it raises prevents that.

        Raises:
            LeaseLostError: another attempt has taken over.
        """
        with self._explained(f"copy {checkpoint.name}"):
            text = (checkpoint / FILE_NAME).read_bytes()
            manifest = parse_manifest(text)
            # what another attempt has still under way, or this one's of a lineage given up, is in another folder
            tag = f"{self._attempt}-{hashlib.sha256(text).hexdigest()[:8]}"
            folder = self._unfinished_folder(manifest.step, tag)
            for name, entry in manifest.files.items():
                may_commit()
                self._refuse_if_gone()
                if self._misfit(folder, name, entry) is None:
                    continue
                self._filesystem.makedirs(f"{folder}/{name}".rpartition("/")[0], exist_ok=True)
                self._filesystem.put_file(str(checkpoint / name), f"{folder}/{name}")
                if problem := self._misfit(folder, name, entry):
                    raise MirrorError(f"cannot copy {checkpoint.name} to {self.url}: {problem}")

            def refuse_if_taken() -> None:
                may_commit()
                self._refuse_if_lost()

            self._commit(folder, manifest.step, text.decode(), refuse_if_taken)
            return manifest

    def remove(self, steps: Sequence[int]) -> None:
        """Delete checkpoints; half of one is never taken for one. Raises as ``copy`` does."""
        with self._explained(f"remove step {', '.join(map(str, steps))}"):
            self._refuse_if_lost()
            self._remove(steps)

    def put_aside(self, after: int) -> None:
        """Keep checkpoints of steps above ``after`` from being found, and lose nothing of them. Raises as ``copy``."""
        with self._explained("put checkpoints aside"):
            self._refuse_if_lost()
            self._put_aside(after)

    def _refuse_if_lost(self) -> None:
        self._refuse_if_gone()
        writer = json.loads(self._read(f"{self._root}/{WRITER}") or b"{}")
        if writer.get("attempt", self._attempt) != self._attempt:
            raise LeaseLostError(
                f"another attempt (process {writer.get('process')} on {writer.get('host')}) now copies checkpoints to "
                f"{self.url}; nothing more is written there"
            )

    def _first_problem(self, step: int, problem_of: Callable[[str, str, Mapping[str, Any]], str | None]) -> str | None:
        with self._explained(f"look at step {step}"):
            folder, found = self._found[step]
            if isinstance(found, DamagedError):
                return str(found)
            return next((why for name, entry in found.files.items() if (why := problem_of(folder, name, entry))), None)

    def _misfit(self, folder: str, name: str, entry: Mapping[str, Any]) -> str | None:
        """Same as ``damage`` has it, of a file over there."""
        if problem := self._wrong_size(folder, name, entry):
            return problem
        digest = xxhash.xxh3_128()
        with self._filesystem.open(f"{folder}/{name}", "rb", block_size=_BLOCK) as content:
            while block := content.read(_BLOCK):
                digest.update(block)
        return None if digest.hexdigest() == entry["xxh3_128"] else f"the content of {name} is not what was written"

    def _wrong_size(self, folder: str, name: str, entry: Mapping[str, Any]) -> str | None:
        try:
            size = self._filesystem.info(f"{folder}/{name}")["size"]
        except FileNotFoundError:
            return f"{name} is missing"
        return None if size == entry["bytes"] else f"{name} has {size} bytes, the manifest says {entry['bytes']}"

    def _read(self, path: str) -> bytes | None:
        """A small file; ``None`` if there is none."""
        try:
            content: bytes = self._filesystem.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """File systems raise any error of the libraries below them."""
        self._filesystem.invalidate_cache()
        try:
            yield
        except (ForgeError, DamagedError):
            raise
        except Exception as error:
            why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            raise MirrorError(f"checkpoint.mirror: cannot {what} at {self.url}: {why}") from error

    @abstractmethod
    def _refuse_if_gone(self) -> None:
        """Raise if what was taken over is there no longer, and nothing of it may be made anew."""

    @abstractmethod
    def _committed(self) -> dict[int, tuple[str, Manifest | DamagedError]]:
        """Folders and manifests by step."""

    @abstractmethod
    def _unfinished_folder(self, step: int, tag: str) -> str:
        """Where a checkpoint is copied to."""

    @abstractmethod
    def _commit(self, folder: str, step: int, manifest: str, may_commit: Callable[[], None]) -> None:
        """All files but the manifest are there; one of the same step that is there gives way."""

    @abstractmethod
    def _write(self, path: str, text: str) -> None:
        """A small file, in one go."""

    @abstractmethod
    def _remove(self, steps: Sequence[int]) -> None: ...

    @abstractmethod
    def _put_aside(self, after: int) -> None: ...

    @abstractmethod
    def _collect_unfinished(self) -> None: ...


class _Folder(Mirror):
    """On a file system of this machine, as a run's own checkpoints are: flushed, and given their names by renaming."""

    def __init__(self, path: Path) -> None:
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # it has no types

        super().__init__(str(path), LocalFileSystem(), str(path))
        self._store = CheckpointStore(path / "checkpoints")

    def _refuse_if_gone(self) -> None:
        if not Path(self._root, WRITER).exists():
            raise MirrorError(
                f"checkpoint.mirror: {self.url} is not there any more, or is another folder than at the start of the "
                f"run: it has no {WRITER}; bring it back (is it mounted?)"
            )

    def _committed(self) -> dict[int, tuple[str, Manifest | DamagedError]]:
        found: dict[int, tuple[str, Manifest | DamagedError]] = {}
        for step in self._store.steps():
            folder = self._store.folder(step)
            try:
                found[step] = str(folder), read_manifest(folder)
            except DamagedError as error:
                found[step] = str(folder), error
        return found

    def _unfinished_folder(self, step: int, tag: str) -> str:
        return str(self._store.unfinished_folder(step, tag))

    def _commit(self, folder: str, step: int, manifest: str, may_commit: Callable[[], None]) -> None:
        flush_tree(Path(folder))
        write_durably(Path(folder) / FILE_NAME, manifest)
        flush(Path(folder))
        may_commit()
        self._store.commit(Path(folder), step)

    def _write(self, path: str, text: str) -> None:
        write_durably(Path(path), text)
        for parent in Path(path).parents[:2]:  # the run's and the runs' folder, which may be as new
            flush(parent)

    def _remove(self, steps: Sequence[int]) -> None:
        self._store.remove(steps)

    def _put_aside(self, after: int) -> None:
        self._store.put_aside(after)

    def _collect_unfinished(self) -> None:
        self._store.remove_unfinished()


class _Objects(Mirror):
    """Where nothing can be renamed in one go, but a small file is written whole or not at all: the manifest comes last.
    The name of a folder ends with what tells attempts and contents apart: ``step_00000500-<attempt>-<digest>``."""

    _NAME = re.compile(r"step_(\d+)-[0-9a-f]+-[0-9a-f]+")
    _ASIDE = f"{FILE_NAME}.aside"

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no types

        try:
            filesystem, root = url_to_fs(url)
        except Exception as error:
            raise MirrorError(f"checkpoint.mirror = {url!r}: {type(error).__name__}: {error}") from error
        super().__init__(url, filesystem, root)

    def _refuse_if_gone(self) -> None:
        """Nothing is mounted there: what is written goes to the same place."""

    def _committed(self) -> dict[int, tuple[str, Manifest | DamagedError]]:
        found: dict[int, tuple[str, Manifest | DamagedError]] = {}
        for step, folder in self._folders():
            if (text := self._read(f"{folder}/{FILE_NAME}")) is None:
                continue
            try:
                entry: Manifest | DamagedError = parse_manifest(text)
            except DamagedError as error:
                entry = error
            if step not in found or _written(entry) > _written(found[step][1]):
                found[step] = folder, entry
        return found

    def _folders(self) -> Iterator[tuple[int, str]]:
        """Whole or not, several of one step perhaps."""
        try:
            paths = self._filesystem.ls(f"{self._root}/checkpoints", detail=False)
        except FileNotFoundError:
            return
        for path in paths:
            if matched := self._NAME.fullmatch(path.rstrip("/").rpartition("/")[2]):
                yield int(matched[1]), path.rstrip("/")

    def _unfinished_folder(self, step: int, tag: str) -> str:
        return f"{self._root}/checkpoints/step_{step:08d}-{tag}"

    def _commit(self, folder: str, step: int, manifest: str, may_commit: Callable[[], None]) -> None:
        earlier = [other for other_step, other in self._folders() if other_step == step and other != folder]
        may_commit()
        self._write(f"{folder}/{FILE_NAME}", manifest)
        for other in earlier:
            if self._filesystem.exists(f"{other}/{FILE_NAME}"):
                self._filesystem.mv(f"{other}/{FILE_NAME}", f"{other}/{self._ASIDE}")

    def _write(self, path: str, text: str) -> None:
        self._filesystem.pipe_file(path, text.encode())

    def _remove(self, steps: Sequence[int]) -> None:
        for step, folder in [*self._folders()]:
            if step in steps:
                self._remove_folder(folder)

    def _remove_folder(self, folder: str) -> None:
        if self._filesystem.exists(f"{folder}/{FILE_NAME}"):
            self._filesystem.rm_file(f"{folder}/{FILE_NAME}")
        self._filesystem.rm(folder, recursive=True)

    def _put_aside(self, after: int) -> None:
        for step, folder in [*self._folders()]:
            if step > after and self._filesystem.exists(f"{folder}/{FILE_NAME}"):
                with _changed_meanwhile():
                    self._filesystem.mv(f"{folder}/{FILE_NAME}", f"{folder}/{self._ASIDE}")

    def _collect_unfinished(self) -> None:
        for _, folder in [*self._folders()]:
            if not any(self._filesystem.exists(f"{folder}/{name}") for name in (FILE_NAME, self._ASIDE)):
                with _changed_meanwhile():
                    self._filesystem.rm(folder, recursive=True)


@contextmanager
def _changed_meanwhile() -> Iterator[None]:
    """An earlier attempt, not refused yet, may remove a file or add one at this moment. The next start collects what is
    left."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _written(entry: Manifest | DamagedError) -> float:
    return datetime.fromisoformat(entry.written).timestamp() if isinstance(entry, Manifest) else 0.0
