"""Writing one file of tokens."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from forge_plugins_data.token_format import Shard

_BUFFERED = 2**20
"""Tokens written together."""


class ShardWriter:
    """Appends documents to ``<file>.partial``; ``finish`` gives the file its name once all of it is on the disk."""

    def __init__(self, file: Path, *, dtype: str, end_of_document: int) -> None:
        self._file = file
        self._partial = file.with_name(file.name + ".partial")
        self._partial.unlink(missing_ok=True)  # of an interruption; or a link, which is not followed
        self._handle = self._partial.open("xb")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._end = np.array([end_of_document], dtype=self._dtype)
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._checksum = hashlib.sha256()
        self._tokens = self._documents = self._skipped = self._max_id = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.close()

    def add(self, ids: np.ndarray | None) -> None:
        """Append a document of ``ids`` ``(N,)`` and its end; one without ids is skipped."""
        if ids is None or not len(ids):
            self._skipped += 1
            return
        self._pending += [ids.astype(self._dtype), self._end]
        self._pending_tokens += len(ids) + 1
        self._documents += 1
        if self._pending_tokens >= _BUFFERED:
            self._flush()

    def finish(self) -> Shard:
        """Complete the file. What is on disk under its name is always whole."""
        self._flush()
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._partial.replace(self._file)
        return Shard(
            file=self._file.name,
            tokens=self._tokens,
            documents=self._documents,
            skipped=self._skipped,
            max_id=self._max_id,
            sha256=self._checksum.hexdigest(),
        )

    def _flush(self) -> None:
        if not self._pending:
            return
        chunk = np.concatenate(self._pending)
        self._handle.write(chunk.data)
        self._checksum.update(chunk.data)
        self._tokens += len(chunk)
        self._max_id = max(self._max_id, int(chunk.max()))
        self._pending.clear()
        self._pending_tokens = 0
