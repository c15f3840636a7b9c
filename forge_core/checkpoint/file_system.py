"""DCP's file system, with errors that name the file."""

from __future__ import annotations

import copyreg
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.utils.serialization import config

from forge_core.checkpoint.fsync import HashedFile, naming

# DCP sends them with a rank's error; from Python 3.13 on they hold code, and a rank that cannot pickle it sends nothing
copyreg.pickle(FrameSummary, lambda frame: (FrameSummary, (frame.filename, frame.lineno, frame.name)))


class NamingFileSystem(FileSystem):
    """One failed write among those of many ranks is then found on the right disk. It remembers what it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[Path, dict[str, Any]] = {}
        """Entries of a manifest, which cost no second look at the bytes."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with naming(Path(path)), super().create_stream(path, mode) as stream:
                yield stream
            return
        # the manifest has a digest, and zip's own costs 0.3 s per GiB; torch declares `patch` where mypy does not look
        with naming(Path(path)), HashedFile(Path(path)) as file, config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            yield file
        self.written[Path(path)] = {"bytes": file.n_bytes, "xxh3_128": file.digest.hexdigest()}

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder for all ranks, which exchange their plans before they write into it."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            super().mkdir(path)


class TensorWriter(FileSystemWriter):
    """DCP's writer. What rank 0 has described stays there: torch sends it to all ranks, who need none of it."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        metadata.state_dict_metadata, metadata.storage_data = {}, {}
