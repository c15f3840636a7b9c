"""Rows of Parquet whose images are bytes in a column, which are not read until they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from forge_core.errors import ConfigError
from forge_plugins_data.file_selection import SelectedFile
from forge_plugins_vlm.data.references import ParquetCell
from forge_plugins_vlm.data.rows import Row


def read_parquet_rows(file: SelectedFile, find: Callable[[str], Path]) -> Iterator[Row]:
    """A row for each of the file. Columns of bytes, of structs with ``bytes`` as ``datasets`` writes them, and of
    arrays of either, are images; others are read.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        parquet = pq.ParquetFile(file.path)
        pictures = [field.name for field in parquet.schema_arrow if is_picture(field.type)]
        others = [field.name for field in parquet.schema_arrow if field.name not in pictures]
        number = 0
        for group in range(parquet.num_row_groups):
            n_rows = parquet.metadata.row_group(group).num_rows
            rows = parquet.read_row_group(group, columns=others).to_pylist() if others else [{}] * n_rows
            counts = {name: _counts(parquet, group, name) for name in pictures}
            for row in range(n_rows):
                number += 1
                images = {
                    name: cells(counts[name][row], partial(ParquetCell, file.path, group, row, name))
                    for name in pictures
                }
                yield Row({**rows[row], **images}, f"row {number} of {file.path}", f"{file.relative}:{number}", find)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the Parquet file {file.path}: {error}") from error


Count = bool | list[bool] | None
"""Of a cell: ``None`` for nothing, true for an image, and for an array whether each of its images is there."""


def cells(count: Count, cell: Callable[[int | None], Any]) -> Any:
    """The images of a cell, by a function of the index within it, as the value of a record."""
    if isinstance(count, list):
        return [cell(index) if there else None for index, there in enumerate(count)]
    return cell(None) if count else None


def counts_of(column: pa.ChunkedArray) -> list[Count]:
    """What there is in the cells of a column of images, whose bytes are not looked at."""
    found: list[Count] = []
    for chunk in column.chunks:
        if not _is_list(chunk.type):
            found += [one or None for one in chunk.is_valid().to_pylist()]
            continue
        there = iter(chunk.flatten().is_valid().to_pylist())
        lengths = pc.list_value_length(chunk).to_pylist()
        found += [None if length is None else [next(there) for _ in range(length)] for length in lengths]
    return found


def is_picture(kind: pa.DataType) -> bool:
    """Whether an Arrow type is that of images: bytes, a struct with ``bytes``, or arrays of either."""
    inner = kind.value_type if _is_list(kind) else kind
    if pa.types.is_struct(inner):
        return bool(inner.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(inner) or pa.types.is_large_binary(inner))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _counts(parquet: pq.ParquetFile, group: int, name: str) -> list[Count]:
    """Of a column: by what stands beside the bytes, where there is something, as that is smaller."""
    leaves = [parquet.schema.column(number).path for number in range(len(parquet.schema))]
    beside = [leaf for leaf in leaves if leaf.startswith(f"{name}.") and leaf.endswith(".path")]
    return counts_of(parquet.read_row_group(group, columns=beside[:1] or [name]).column(name))
