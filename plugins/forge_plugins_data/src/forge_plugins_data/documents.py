"""Documents from text, JSONL and Parquet files, and how such files are cut into units of work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from forge_core.errors import ConfigError
from forge_plugins_data.config import EncodingErrors
from forge_plugins_data.encoding import valid_text
from forge_plugins_data.plain_text import JSON_LINES, refuse_what_is_no_text
from forge_plugins_data.unpacking import COMPRESSED, open_unpacked

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

PARQUET = (".parquet",)
DEFAULT_PATTERNS = tuple(
    f"**/*{ending}{compression}" for ending in (".txt", *JSON_LINES) for compression in ("", *COMPRESSED)
) + tuple(f"**/*{ending}" for ending in PARQUET)
"""What is taken from a folder unless something else is asked for."""
CHOICE = "--text-field, or the key text_field of a data source"


@attrs.frozen
class Unit:
    """A part of the input, small enough to be done again after an interruption. It becomes one file of tokens."""

    kind: Literal["text", "jsonl", "parquet"]
    files: tuple[str, ...]
    """Several for text, where each is one document; else one."""
    start: int = 0
    """First byte (JSONL) or row group (Parquet)."""
    stop: int | None = None
    """Up to, not including, this byte or row group; ``None`` is the end."""
    size: int = 0
    """Bytes on disk, for progress."""
    is_any: bool = False
    """Whether text files may hold anything, not just text."""


@attrs.frozen
class Document:
    """The content of one document, not yet decoded where the format leaves that to us."""

    content: bytes | str | None
    """``None`` where a record has a null, or is to be skipped because it is not UTF-8."""
    where: object
    """For messages, whose text it is."""


def plan_units(files: Sequence[Path], unit_size: int, field: str, *, binary: bool = False) -> list[Unit]:
    """Cut files, in their order, into units of about ``unit_size`` bytes. A function of the files' sizes alone.

    Args:
        binary: text files may hold anything.

    Raises:
        ConfigError: a Parquet file is damaged or has no column ``field``.
    """
    units: list[Unit] = []
    texts: list[tuple[str, int]] = []

    def flush() -> None:
        if texts:
            names, size = tuple(name for name, _ in texts), sum(size for _, size in texts)
            units.append(Unit("text", names, size=size, is_any=binary))
            texts.clear()

    for file in files:
        kind = _kind(file)
        if kind == "text":
            texts.append((str(file), file.stat().st_size))
            if sum(size for _, size in texts) >= unit_size:
                flush()
            continue
        flush()
        units += _row_groups(file, unit_size, field) if kind == "parquet" else _line_ranges(file, unit_size)
    flush()
    return units


def units_of(file: Path, kind: Literal["jsonl", "parquet"], field: str) -> list[Unit]:
    """A file that is read as ``kind`` at one go, by any name.

    Raises:
        ConfigError: it is of the other kind; a Parquet file is damaged or has no column ``field``.
    """
    is_parquet = _is_parquet(file)
    if kind == "jsonl" and is_parquet:
        raise ConfigError(f"{file} is a Parquet file, not JSON Lines: the data source 'parquet' reads it")
    if kind == "parquet" and not is_parquet and _kind(file) == "jsonl":
        raise ConfigError(f"{file} is JSON Lines, not a Parquet file: the data source 'jsonl' reads it")
    return [Unit("jsonl", (str(file),))] if kind == "jsonl" else _row_groups(file, 2**62, field)


def read_documents(unit: Unit, field: str, errors: EncodingErrors) -> Iterator[Document]:
    """The documents of a unit in order; those of JSONL and Parquet from the key or column ``field``.

    Raises:
        ConfigError: damaged input, a text file that is no text, or ``field`` is missing or not text.
    """
    if unit.kind == "text":
        for name in unit.files:
            with open_unpacked(Path(name)) as handle:
                content = handle.read()
            if not unit.is_any:
                refuse_what_is_no_text(content, name)
            yield Document(content, name)
    elif unit.kind == "jsonl":
        yield from _read_jsonl(unit, field, errors)
    else:
        yield from _read_parquet(unit, field, errors)


def read_records(file: Path) -> Iterator[tuple[dict[str, Any], object]]:
    """The objects of a JSON Lines file, and of each, for messages, where it is.

    Raises:
        ConfigError: it is a Parquet file; a line is not JSON, not UTF-8 or no object.
    """
    if _is_parquet(file):
        raise ConfigError(f"{file} is a Parquet file, not JSON Lines; convert it")
    for line, where in _lines(Unit("jsonl", (str(file),))):
        try:
            record = _parsed(line, where)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where} is not UTF-8 ({error}); convert the file to UTF-8") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{where} must be an object, it is {json.dumps(record)[:80]}")
        yield record, where


def _kind(file: Path) -> Literal["text", "jsonl", "parquet"]:
    ending = file.with_suffix("").suffix if file.suffix in COMPRESSED else file.suffix
    if ending in PARQUET:
        return "parquet"
    return "jsonl" if ending in JSON_LINES else "text"


def _is_parquet(file: Path) -> bool:
    with open_unpacked(file) as handle:
        return handle.read(4) == b"PAR1"


def _line_ranges(file: Path, unit_size: int) -> list[Unit]:
    size = file.stat().st_size
    if file.suffix in COMPRESSED:  # cannot be entered in the middle
        return [Unit("jsonl", (str(file),), size=size)]
    return [
        Unit("jsonl", (str(file),), start, min(start + unit_size, size), min(unit_size, size - start))
        for start in range(0, size, unit_size)
    ]


def _row_groups(file: Path, unit_size: int, field: str) -> list[Unit]:
    import pyarrow as pa  # starts threads; text does without it

    with _parquet(file) as parquet:
        names = parquet.schema_arrow.names
        if names.count(field) != 1:
            has = f"several columns {field!r}" if field in names else f"no column {field!r}"
            raise ConfigError(f"{file} has {has}; its columns are {', '.join(names)} (choose with {CHOICE})")
        column = parquet.schema_arrow.field(field).type
        values = column.value_type if pa.types.is_dictionary(column) else column
        if not (pa.types.is_string(values) or pa.types.is_large_string(values) or pa.types.is_string_view(values)):
            raise ConfigError(f"{file}: the column {field!r} holds {column}, not text")
        metadata = parquet.metadata
        sizes = [
            sum(metadata.row_group(i).column(j).total_compressed_size for j in range(metadata.num_columns))
            for i in range(metadata.num_row_groups)
        ]
    units, start, pending = [], 0, 0
    for i, size in enumerate(sizes):
        pending += size
        if pending >= unit_size or i == len(sizes) - 1:
            units.append(Unit("parquet", (str(file),), start, i + 1, pending))
            start, pending = i + 1, 0
    return units


def _read_jsonl(unit: Unit, field: str, errors: EncodingErrors) -> Iterator[Document]:
    for line, where in _lines(unit):
        yield Document(_text_of(line, field, errors, where), where)


def _lines(unit: Unit) -> Iterator[tuple[bytes, _Line]]:
    """The lines that begin within the unit's bytes, so that each line of a file is in exactly one unit. Empty ones are
    left out."""
    file = Path(unit.files[0])
    with open_unpacked(file) as handle:
        position = unit.start
        if unit.start:
            handle.seek(unit.start - 1)
            position += len(handle.readline()) - 1  # the rest of a line that begins in the unit before
        while unit.stop is None or position < unit.stop:
            line = handle.readline()
            if not line:
                return
            begin, position = position, position + len(line)
            if line.strip():
                yield line, _Line(file, begin)


@attrs.frozen
class _Line:
    """A line of a file, by where it begins. Its number is counted when somebody is told of it."""

    file: Path
    begin: int

    def __str__(self) -> str:
        with open_unpacked(self.file) as handle:
            number, left = 1, self.begin
            while left and (part := handle.read(min(left, 1 << 20))):
                number, left = number + part.count(b"\n"), left - len(part)
        return f"{self.file}, line {number}"


def _text_of(line: bytes, field: str, errors: EncodingErrors, where: _Line) -> str | None:
    try:
        record = _parsed(line, where)
    except UnicodeDecodeError as error:
        if errors == "skip":
            return None
        if errors == "strict":
            raise ConfigError(
                f'{where} is not UTF-8 ({error}); encoding_errors "replace" or "skip" allow it'
            ) from error
        return _text_of(line.decode("utf-8", "replace").encode(), field, errors, where)
    if not isinstance(record, dict) or field not in record:
        has = f"its keys are {', '.join(record)}" if isinstance(record, dict) else "it is not an object"
        raise ConfigError(f"{where} has no {field!r}; {has} (choose with {CHOICE})")
    text = record[field]
    if not isinstance(text, str | None):
        raise ConfigError(f"{where}: {field!r} must be text, it is {json.dumps(text)[:80]}")
    return text


def _parsed(line: bytes, where: _Line) -> Any:
    """
    Raises:
        ConfigError: the line is not JSON.
        UnicodeDecodeError: it is not UTF-8.
    """
    try:
        return json.loads(line)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        said = (
            f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        cut = "" if line.endswith(b"\n") else "; the file ends within this line, so it may be truncated"
        raise ConfigError(f"{where} is not JSON: {said}{cut}") from error


def _read_parquet(unit: Unit, field: str, errors: EncodingErrors) -> Iterator[Document]:
    file = Path(unit.files[0])
    assert unit.stop is not None, "the plan has counted the row groups"
    with _parquet(file) as parquet:
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(unit.start))
        groups = [*range(unit.start, unit.stop)]
        for batch in parquet.iter_batches(batch_size=1024, row_groups=groups, columns=[field]):
            for content in _contents(batch.column(0)):
                row += 1
                where = f"{file}, row {row}"
                yield Document(valid_text(content, errors, where) if isinstance(content, bytes) else content, where)


def _contents(column: pa.Array) -> list[str | bytes | None]:
    """The values of a column of text; all of them as bytes if one is not UTF-8, which Arrow does not look at."""
    import pyarrow as pa

    try:
        texts: list[str | bytes | None] = column.to_pylist()
    except UnicodeDecodeError:
        texts = column.cast(pa.large_binary()).to_pylist()
    return texts


@contextmanager
def _parquet(file: Path) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file} is damaged or not a Parquet file: {error}") from error
    with parquet:
        try:
            yield parquet
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{file} is damaged: {error}") from error
