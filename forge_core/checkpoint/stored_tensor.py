"""A tensor as it lies in a file of a checkpoint, and reading no more of it than is needed.

It is a zip archive that ``torch.save`` has written, with those of other tensors before and after it. What describes it
takes some 10 KB; of its values, a rank reads those that it holds.
"""

from __future__ import annotations

import io
import math
import os
import sys
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index

from forge_core.checkpoint.manifest import DamagedError

_PAGE = 4096
"""Bytes. File systems read whole pages: of rows that are shorter, what is not wanted comes along anyway."""


def read_part(
    file: io.FileIO, place: Any, described: torch.Tensor, offsets: Sequence[int], target: torch.Tensor
) -> None:
    """Fill ``target`` with the part of a stored tensor that begins at ``offsets`` and has the target's shape.

    Args:
        file: without a buffer, which some file systems want to have megabytes, and fill at each jump.
        place: where it lies, as DCP's ``_StorageInfo``.
        described: its dtype and shape, on the meta device.

    Raises:
        DamagedError: the archive is compressed, or of another tensor.
        Exception: it is no archive of a tensor.
    """
    record: Any = _Record(file, place)
    _refuse_packed(record)
    device = "meta" if _is_native(record) else "cpu"  # torch turns bytes round on meta, too, and ends with signal 11
    record.seek(0)
    stored = torch.load(record, map_location=device, weights_only=True)
    if (stored.dtype, stored.shape) != (described.dtype, described.shape):
        what, instead = (f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in (stored, described))
        raise DamagedError(f"{record.name} has a tensor {what}, described as {instead}")
    start = _first_byte(stored)
    if start is None:
        record.seek(0)
        stored = torch.load(record, map_location="cpu", weights_only=True)
        target.copy_(narrow_tensor_by_index(stored, offsets, target.shape))
        return
    is_readable_into = target.device.type == "cpu" and target.is_contiguous()
    values = target if is_readable_into else torch.empty(target.shape, dtype=target.dtype)
    into = values.reshape(-1).view(torch.uint8).numpy().reshape(*target.shape, target.itemsize)
    _read(record, start, (*stored.shape, stored.itemsize), (*offsets, 0), into)
    if values is not target:
        target.copy_(values)


class _Record(io.RawIOBase):
    """The bytes of one archive, as a file of its own: ``zipfile`` in newer Pythons refuses others before it."""

    def __init__(self, file: io.FileIO, place: Any) -> None:
        self.name: str = place.relative_path
        self._file, self._start, self._length, self._at = file, place.offset, place.length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset
        if self._at < 0:
            raise OSError("there is nothing before its beginning")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """It is not short before the end, as a system's call for more than 2 GiB is."""
        view, done = memoryview(buffer)[: max(0, self._length - self._at)], 0
        self._file.seek(self._start + self._at)
        while done < len(view) and (more := self._file.readinto(view[done:])):
            done += int(more)
        self._at += done
        return done


def _refuse_packed(record: _Record) -> None:
    """All of the archive is stored as it is, as torch writes it, or it could unpack to more than there is."""
    try:
        members = zipfile.ZipFile(record).infolist()
    except zipfile.BadZipFile as error:
        raise error.__context__ or error from None  # it does not tell what the disk has said
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > record.seek(0, os.SEEK_END):
        raise DamagedError(f"{record.name} has a compressed record")


def _is_native(record: Any) -> bool:
    """A machine of this one's byte order wrote it. Who reads the archive for ``torch.load`` says so: another reader
    may be made to see another archive."""
    record.seek(0)
    archive: Any = torch._C.PyTorchFileReader(record)
    return not archive.has_record("byteorder") or bool(archive.get_record("byteorder") == sys.byteorder.encode())


def _first_byte(stored: torch.Tensor) -> int | None:
    """Where its values begin; ``None`` if they are not simply one after the other, and torch has to make sense of
    them."""
    if stored.layout is not torch.strided or not stored.is_contiguous() or stored.is_conj() or stored.is_neg():
        return None
    start = stored.untyped_storage()._checkpoint_offset
    return None if start is None else start + int(stored.storage_offset()) * stored.itemsize


def _read(record: _Record, start: int, shape: Sequence[int], offsets: Sequence[int], into: Any) -> None:
    """Fill the array ``into`` with a part, at ``offsets``, of an array of this shape that begins at ``start``. Both are
    of bytes, and the last dimension is whole."""
    row, wanted = math.prod(shape[1:]), into.shape[1:]
    start += offsets[0] * row
    if wanted == tuple(shape[1:]):
        record.seek(start)
        if record.readinto(into.reshape(-1)) < into.size:
            raise DamagedError(f"{record.name} ends within a tensor")
    elif row < _PAGE:
        rows = np.empty((len(into), *shape[1:]), np.uint8)
        _read(record, start, rows.shape, [0] * rows.ndim, rows)
        into[:] = rows[:, *(slice(begin, begin + n) for begin, n in zip(offsets[1:], wanted, strict=True))]
    else:
        for i, one in enumerate(into):
            _read(record, start + i * row, shape[1:], offsets[1:], one)
