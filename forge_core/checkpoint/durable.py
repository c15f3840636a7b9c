"""Writing that is still there after a power cut: what a file holds, and that it exists, are flushed separately."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a new file, or replace one in one go. Its name is durable once its folder has been flushed."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def flush_tree(folder: Path) -> None:
    """Flush every file below ``folder``, and the folders themselves."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """What a file holds, or which names a folder has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
