"""DCP's file system, with errors that name the file."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem

from forge_core.checkpoint.fsync import naming, open_large


class NamingFileSystem(FileSystem):
    """One failed write among those of many ranks is then found on the right disk."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        opened = open_large(Path(path)) if mode == "wb" else super().create_stream(path, mode)
        with naming(Path(path)), opened as stream:
            yield stream
