"""Writing that is still there after a power cut: what a file holds, and that it exists, are flushed separately."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

_PIECE = 2**20
"""Bytes. Linux keeps a longer write in larger stretches of memory, which it must first find: that takes two to four
times as long (seen with Linux 6.18 and ext4)."""


class _InPieces(io.FileIO):
    """It takes the first piece of what it is given, and says so; who writes to it goes on with the rest."""

    def write(self, data: Any, /) -> int:
        return super().write(memoryview(data).cast("B")[:_PIECE])


def open_large(path: Path) -> io.BufferedWriter:
    """Open a new file of bytes, for writes of any size."""
    return io.BufferedWriter(_InPieces(path, "wb"))


class HashedFile(io.BufferedWriter):
    """Opens a new file of bytes, for writes of any size, one after the other, and knows their digest."""

    def __init__(self, path: Path) -> None:
        super().__init__(_InPieces(path, "wb"))
        self.n_bytes = 0
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any, /) -> int:
        self.n_bytes += (written := super().write(data))
        self.digest.update(data)
        return written


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an ``OSError`` say which file it is about: the system does not where one is read, written or flushed."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_durably(path: Path, text: str | Iterable[str]) -> None:
    """Write a new file, or replace one in one go; of a long text, give pieces. Its name is durable once its folder has
    been flushed."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a crash; or a link that somebody has put there, which is not followed
    with naming(temporary), temporary.open("x") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def make_folder(path: Path) -> None:
    """A folder with those above it, each of which is still there after a power cut."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        flush(one.parent)


def flush_tree(folder: Path, but: Collection[str] = ()) -> None:
    """Flush every file below ``folder``, and the folders themselves.

    Args:
        but: files that have been flushed, by their paths below the folder.
    """
    for path in folder.rglob("*"):
        if path.relative_to(folder).as_posix() not in but:
            flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)
