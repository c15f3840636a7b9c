"""A file system for fsspec as object stores are: an object is there whole or not at all, and cannot be renamed. Folders
are only what names have in common. Objects are kept in files, so that they outlive the process."""

from __future__ import annotations

import io
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


class Objects(AbstractFileSystem):
    """``objects:///folder/name``. What may go wrong is said by the class, as everybody gets an object of their own."""

    protocol = "objects"
    cachable = False
    bytes_left: ClassVar[int | None] = None
    """Until the connection is gone, for good; ``None`` is for ever."""
    flips: ClassVar[bool] = False
    """Whether each object of some size arrives with a bit of it turned."""
    put: ClassVar[list[str]] = []
    """Names of the objects that have arrived, in that order."""

    @classmethod
    def well(cls) -> None:
        """Nothing goes wrong any more."""
        cls.bytes_left, cls.flips = None, False
        cls.put.clear()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("objects://").rstrip("/")

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self._store(self._strip_protocol(rpath), Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self._store(self._strip_protocol(path), value)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self._store(self._strip_protocol(path2), self.cat_file(path1))

    def _store(self, path: str, content: bytes) -> None:
        self._use(len(content))
        if self.flips and len(content) > 1000:
            content = content[:500] + bytes([content[500] ^ 1]) + content[501:]
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        arriving = target.with_name(f"...{uuid.uuid4().hex}")
        with arriving.open("wb") as file:
            for start in range(0, len(content), 1 << 16):
                file.write(content[start : start + (1 << 16)])
        arriving.rename(target)
        Objects.put.append(target.name)

    def _use(self, n_bytes: int) -> None:
        left = Objects.bytes_left
        if left:
            Objects.bytes_left = left = max(0, left - n_bytes - 1)
        if left == 0:  # and stays so for as long as nobody else says otherwise, in another thread maybe
            raise ConnectionResetError("the other side has hung up")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._use(0)
        return Path(self._strip_protocol(path)).read_bytes()[start:end]

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self.cat_file(path))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._use(0)
        place = Path(self._strip_protocol(path))
        if place.is_dir():
            return {"name": str(place), "size": 0, "type": "directory"}
        return {"name": str(place), "size": place.stat().st_size, "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self._use(0)
        names = [entry.path for entry in os.scandir(self._strip_protocol(path)) if not entry.name.startswith("...")]
        return [self.info(name) for name in names] if detail else names

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._use(0)

    def rm_file(self, path: str) -> None:
        self._use(0)
        Path(self._strip_protocol(path)).unlink()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._use(0)
        place = Path(self._strip_protocol(path))
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self.cp_file(path1, path2)
        self.rm_file(path1)


fsspec.register_implementation("objects", Objects, clobber=True)
