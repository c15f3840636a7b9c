"""One shard of one site, written as rows come: a file of safetensors, whose header is filled in at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forge_core.checkpoint.fsync import flush, make_folder
from forge_plugins_interp.store import shard_file

_HEADER_BYTES = 1024
"""Kept free at the beginning: eight bytes with the length of the header, the header, and spaces, which belong to it."""
_SYNCED_BYTES = 16 * 2**20
"""So much is brought to the disk at a time, while forwards run. At the end little is left to wait for."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardFile:
    """Takes no more memory than the rows that are being written.

    Args:
        folder: of the store.
        site: its name.
        shard: its number.
        rows: the first ones, whose dtype and sizes all have.
    """

    def __init__(self, folder: Path, site: str, shard: int, rows: torch.Tensor) -> None:
        self._path = shard_file(folder, site, shard)
        make_folder(self._path.parent)
        self._temporary = self._path.with_suffix(".new")
        self._file = self._temporary.open("wb")
        self._file.write(bytes(_HEADER_BYTES))
        self._dtype, self._sizes, self._n_rows, self._n_unsynced = rows.dtype, tuple(rows.shape[1:]), 0, 0
        self.append(rows)

    def append(self, rows: torch.Tensor) -> None:
        """Write rows ``(n, …)``."""
        assert (rows.dtype, tuple(rows.shape[1:])) == (self._dtype, self._sizes), "all rows of a site are alike"
        self._n_rows += len(rows)
        self._write(rows)

    def commit(self, more: Mapping[str, torch.Tensor]) -> None:
        """Give the shard its name, once all of it is on the disk.

        Args:
            more: further tensors, beside ``values``.
        """
        begin = 0
        table: dict[str, Any] = {}
        for name, dtype, shape in [
            ("values", self._dtype, (self._n_rows, *self._sizes)),
            *((name, one.dtype, tuple(one.shape)) for name, one in more.items()),
        ]:
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            table[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
            begin = end
        for one in more.values():
            self._write(one)
        header = json.dumps(table).encode().ljust(_HEADER_BYTES - 8)
        assert len(header) == _HEADER_BYTES - 8, "it has three tensors at most"
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()
        flush(self._temporary)
        self._temporary.replace(self._path)
        flush(self._path.parent)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, tensor: torch.Tensor) -> None:
        array: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(memoryview(array))
        self._n_unsynced += array.size
        if self._n_unsynced >= _SYNCED_BYTES:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._n_unsynced = 0
