"""Token files that other programs have written, read as they lie on the disk.

Each is one row of little-endian ids; what differs is where their type is written down. No format says how large the
vocabulary is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import ConfigError
from forge_core.job import read_regular_file

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<QBQQ")
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
_LITDATA_DTYPES = {11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8", 20: "u2"}
_DATATROVE_DTYPES = {1: "u1", 2: "u2", 4: "u4"}
_MAX_INDEX = 2**28
"""Bytes of a JSON index."""


def map_megatron(index: Path) -> np.ndarray:
    """The ids ``(N,)`` of ``x.bin`` beside Megatron's ``x.idx``, memory-mapped, all sequences in their order.

    The index has 9 bytes of magic; version (uint64), type (uint8), number of sequences and of document borders
    (uint64); then lengths (int32), where each begins (int64, bytes) and the borders (int64). An end of document is
    among the ids only where the data were made with ``--append-eod``.

    Raises:
        ConfigError: either file is missing, truncated or of another format, or sequences lie in another order.
    """
    file = index.with_suffix(".bin")
    begin = len(_MEGATRON_MAGIC) + _MEGATRON_HEADER.size
    with index.open("rb") as handle:
        head = handle.read(begin)
    if not head.startswith(_MEGATRON_MAGIC) or len(head) < begin:
        raise ConfigError(f"{index} is truncated or not an index of Megatron's (its first bytes are {head[:9]!r})")
    version, code, n_sequences, n_borders = _MEGATRON_HEADER.unpack(head[len(_MEGATRON_MAGIC) :])
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ConfigError(f"{index} has version {version} and the type {code}; ids of version 1 are read, of integers")
    expected = begin + 12 * n_sequences + 8 * n_borders
    if index.stat().st_size < expected:
        raise ConfigError(f"{index} is truncated: {n_sequences} sequences take {expected} bytes; copy it again")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    if not n_sequences:
        return np.empty(0, dtype)
    lengths = np.memmap(index, "<i4", "r", begin, (n_sequences,))
    starts = np.memmap(index, "<i8", "r", begin + 4 * n_sequences, (n_sequences,))
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if starts[0] or not np.array_equal(starts[1:], ends[:-1]):
        raise ConfigError(
            f"{index}: its sequences do not follow each other in {file.name}; write the data anew, merged"
        )
    return map_raw(file, dtype, tokens=int(ends[-1]) // dtype.itemsize, said_by=index.name)


def map_datatrove(file: Path, dtype: str | None) -> np.ndarray:
    """The ids ``(N,)`` of a ``.ds`` of datatrove and nanotron, memory-mapped.

    ``x.ds.metadata`` says ``tokenizer|bytes of an id`` and, in its second line, how many ids there are.

    Args:
        dtype: of the ids, where there is no metadata.

    Raises:
        ConfigError: neither says what the ids are; or the file is truncated.
    """
    metadata = file.with_name(file.name + ".metadata")
    if not metadata.is_file():
        if dtype is None:
            raise ConfigError(
                f"{file}: {metadata.name} is not beside it, which says how many bytes an id has; copy it there, or set "
                'dtype ("uint16" for vocabularies up to 65,536 ids, "uint32" above)'
            )
        return map_raw(file, np.dtype(dtype))
    lines = metadata.read_text(encoding="utf-8", errors="replace").splitlines()
    size = lines[0].rpartition("|")[2] if lines else ""
    if not size.isdecimal() or int(size) not in _DATATROVE_DTYPES:
        raise ConfigError(f"{metadata} does not say how many bytes an id has: its first line must end in |2 or |4")
    tokens = int(lines[1]) if len(lines) > 1 and lines[1].isdecimal() else None
    return map_raw(file, np.dtype(_DATATROVE_DTYPES[int(size)]), tokens=tokens, said_by=metadata.name)


def litdata_chunks(index: Path) -> Sequence[Path] | None:
    """The chunks that the ``index.json`` of litgpt (litdata) lists, in its order; ``None`` if it is another JSON."""
    content = _litdata_index(index)
    return None if content is None else [index.parent / str(chunk["filename"]) for chunk in content["chunks"]]


def map_litdata(file: Path, index: Path) -> np.ndarray:
    """The ids ``(N,)`` of a chunk of litgpt, memory-mapped.

    A chunk has the number of its items (uint32), where each begins and the last ends (uint32, bytes), and the ids of
    all of them; the index has their type, by a number of litdata's.

    Raises:
        ConfigError: it is compressed, holds something else than rows of integers, or is truncated.
    """
    content = _litdata_index(index)
    assert content is not None, "its chunks have been listed"
    config = content.get("config", {})
    formats = config.get("data_format") or [""]
    name, _, code = str(formats[0]).partition(":")
    if config.get("compression") or config.get("encryption"):
        raise ConfigError(f"{index}: its chunks are compressed or encrypted; write them without")
    if len(formats) != 1 or name != "no_header_tensor" or not code.isdecimal() or int(code) not in _LITDATA_DTYPES:
        raise ConfigError(
            f"{index}: its chunks hold {formats}, and ids of tokens are one 'no_header_tensor' of integers"
        )
    if not file.is_file():
        raise ConfigError(f"{file} is missing, which {index.name} lists; copy it there")
    with file.open("rb") as handle:
        n_items = int.from_bytes(handle.read(4), "little")
        header = 4 * (n_items + 2)
        handle.seek(header - 4)
        end = int.from_bytes(handle.read(4), "little")
    size, dtype = file.stat().st_size, np.dtype(_LITDATA_DTYPES[int(code)])
    if size != end or end < header or (end - header) % dtype.itemsize:
        raise ConfigError(f"{file} is truncated or no chunk of litdata: by its header it ends at {end}, and has {size}")
    return _mapped(file, dtype, header)


def map_raw(file: Path, dtype: np.dtype[Any], *, tokens: int | None = None, said_by: str = "") -> np.ndarray:
    """The ids ``(N,)`` of a file that has nothing else in it, memory-mapped.

    Args:
        tokens: how many there must be, which ``said_by`` says.

    Raises:
        ConfigError: the file is missing, or its size is another one.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is missing, which {said_by} is about; copy it there")
    size = file.stat().st_size
    if tokens is not None and size != tokens * dtype.itemsize:
        what = "truncated" if size < tokens * dtype.itemsize else "longer than it should be"
        raise ConfigError(
            f"{file} is {what}: {tokens} tokens of {dtype.name}, as {said_by} has it, are {tokens * dtype.itemsize} "
            f"bytes, and it has {size}. Copy it again."
        )
    if size % dtype.itemsize:
        raise ConfigError(
            f"{file} has {size} bytes, which are no whole number of {dtype.name}: dtype is wrong, or it is truncated"
        )
    return _mapped(file, dtype, 0)


def _mapped(file: Path, dtype: np.dtype[Any], offset: int) -> np.ndarray:
    if file.stat().st_size == offset:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype.newbyteorder("<"), "r", offset).view(np.ndarray)


def _litdata_index(index: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(read_regular_file(index, _MAX_INDEX))
    except (OSError, ValueError, RecursionError):
        return None  # said where it is read as an index of ours
    is_one = isinstance(content, dict) and isinstance(content.get("chunks"), list) and "config" in content
    return content if is_one else None
