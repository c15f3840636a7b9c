"""A tensor as it lies in a file of a checkpoint, and reading no more of it than is needed.

It is a zip archive that ``torch.save`` has written, with those of other tensors before and after it. What describes it
takes some 10 KB. A rank reads the values that it holds.
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
_SMALL = 16_384
"""Bytes of a record that is not worth looking for its parts."""


def read_part(file: int, place: Any, described: torch.Tensor, offsets: Sequence[int], target: torch.Tensor) -> None:
    """Fill ``target`` with the part of a stored tensor that begins at ``offsets`` and has the target's shape.

    Args:
        file: as the system counts it. Python's has a buffer, which on some file systems is of megabytes, and is filled
            at each jump.
        place: where it lies, as DCP's ``_StorageInfo``.
        described: its dtype and shape, on the meta device.

    Raises:
        DamagedError: the archive is compressed, or of another tensor.
        Exception: it is no archive of a tensor.
    """
    record: Any = _Record(file, place)
    if place.length <= _SMALL:
        record = io.BytesIO(record.read(place.length))
    is_usual = _sizes(record, place).get("data/0") == described.nbytes and place.length > _SMALL
    start = _first_byte(record) if is_usual else None
    stored = _load(record, "cpu" if start is None else "meta")
    if (stored.dtype, stored.shape) != (described.dtype, described.shape):
        what, instead = (f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in (stored, described))
        raise DamagedError(f"{place.relative_path} has a tensor {what}, described as {instead}")
    if start is None or not _is_in_order(stored, start):
        whole = stored if start is None else _load(record, "cpu")
        target.copy_(narrow_tensor_by_index(whole, offsets, target.shape))
        return
    is_readable_into = target.device.type == "cpu" and target.is_contiguous()
    values = target if is_readable_into else torch.empty(target.shape, dtype=target.dtype)
    into = values.reshape(-1).view(torch.uint8).numpy().reshape(*target.shape, target.itemsize)
    _read(record, start, (*stored.shape, stored.itemsize), (*offsets, 0), into)
    if values is not target:
        target.copy_(values)


class _Record(io.RawIOBase):
    """The bytes of one archive, as a file of its own: ``zipfile`` in newer Pythons refuses others before it."""

    def __init__(self, file: int, place: Any) -> None:
        self._file, self._place, self._at = file, place, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.length}[whence] + offset
        if self._at < 0:
            raise OSError("there is nothing before its beginning")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._place.length - self._at)]
        self.fill(self._at, view)
        self._at += len(view)
        return len(view)

    def fill(self, at: int, into: Any) -> None:
        """With bytes from ``at`` on. The system may give less at a time, as of more than 2 GiB."""
        is_inside = at + len(into) <= self._place.length
        while is_inside and into and (n := os.preadv(self._file, [into], self._place.offset + at)):
            into, at = into[n:], at + n
        if into:
            raise DamagedError(f"{self._place.relative_path} ends within a tensor")


def _sizes(record: Any, place: Any) -> dict[str, int]:
    """Bytes of what is in the archive, by name. All of it is stored as it is, as torch writes it, or it could unpack
    to more than there is."""
    try:
        members = zipfile.ZipFile(record).infolist()
    except zipfile.BadZipFile as error:
        raise error.__context__ or error from None  # it does not tell what the disk has said
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > place.length:
        raise DamagedError(f"{place.relative_path} has a compressed record")
    return {member.filename.partition("/")[2]: member.file_size for member in members}


def _first_byte(record: Any) -> int | None:
    """Where values begin that a machine of this one's byte order has written: torch turns others round on the meta
    device, too, and ends with signal 11. Who reads the archive for ``torch.load`` says so: another reader may be made
    to see another archive."""
    record.seek(0)
    archive: Any = torch._C.PyTorchFileReader(record)
    is_native = not archive.has_record("byteorder") or archive.get_record("byteorder") == sys.byteorder.encode()
    return int(archive.get_record_offset("data/0")) if is_native else None


def _load(record: Any, device: str) -> Any:
    record.seek(0)
    return torch.load(record, map_location=device, weights_only=True)


def _is_in_order(stored: torch.Tensor, start: int) -> bool:
    """Its values are those from ``start`` on, one after the other, and torch need not make sense of them."""
    is_plain = stored.layout is torch.strided and stored.is_contiguous() and not (stored.is_conj() or stored.is_neg())
    return is_plain and stored.untyped_storage()._checkpoint_offset == start


def _read(record: _Record, start: int, shape: Sequence[int], offsets: Sequence[int], into: Any) -> None:
    """Fill the array ``into`` with a part, at ``offsets``, of an array of this shape that begins at ``start``. Both are
    of bytes, and the last dimension is whole."""
    rows = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    is_whole = [into.shape[d + 1 :] == tuple(shape[d + 1 :]) for d in range(len(shape))]
    d = next(d for d, row in enumerate(rows) if is_whole[d] or row < _PAGE)
    begins = np.array([start + offsets[d] * rows[d]])
    for offset, n, row in zip(offsets[:d], into.shape, rows, strict=False):
        begins = np.add.outer(begins, (offset + np.arange(n)) * row)
    stretches = into.reshape(begins.size, *into.shape[d:])
    wanted = [slice(offset, offset + n) for offset, n in zip(offsets[d + 1 :], into.shape[d + 1 :], strict=True)]
    for begin, stretch in zip(begins.flat, stretches, strict=True):
        read: Any = stretch if is_whole[d] else np.empty((len(stretch), *shape[d + 1 :]), np.uint8)
        record.fill(int(begin), memoryview(read.reshape(-1)))
        if read is not stretch:
            stretch[:] = read[:, *wanted]
