"""Token files on disk: raw little-endian ids in ``.bin`` files, and JSON that says everything about them.

A prepared folder has an ``index.json`` for all of its files; each file ``x.bin`` also has an ``x.json`` of the same
format, so that it can be used alone. Nothing is guessed from the size of a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs.validators import ge, in_, le, lt, optional

from forge_core.errors import ConfigError
from forge_core.job import InvalidError, read_regular_file, structure
from forge_core.registry.catalog import Catalog

INDEX = "index.json"
SETTINGS = "settings.json"
"""Written first by ``forge data prepare``; a folder that has it and no index is not finished."""
FORMAT = "forge-tokens"
VERSION = 1
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


_COUNT = [ge(0), lt(2**62)]
"""Of what is multiplied by a few bytes in 64 bits."""
_MAX_BYTES = 2**28
_MAX_VOCABULARY = 2**32


def _file_name(_: object, __: object, value: str) -> None:
    if Path(value).name != value or not value.isprintable():
        raise ValueError(f"must be the name of a file beside the JSON, got {value!r}")


@attrs.frozen(kw_only=True)
class Shard:
    """One ``.bin`` file."""

    file: str = attrs.field(validator=_file_name)
    tokens: int = attrs.field(validator=_COUNT)
    documents: int | None = attrs.field(default=None, validator=optional(_COUNT))
    skipped: int | None = attrs.field(default=None, validator=optional(_COUNT))
    """Documents left out: without any text, or not UTF-8."""
    max_id: int | None = attrs.field(default=None, validator=optional(_COUNT))
    """The largest id; without it the file is read once when it is opened. 0 if there are no tokens."""
    sha256: str | None = None


@attrs.frozen(kw_only=True)
class TokenHeader:
    """What the JSON says."""

    dtype: str = attrs.field(validator=in_(DTYPES))
    vocab_size: int = attrs.field(validator=[ge(0), le(_MAX_VOCABULARY)])
    end_of_document: int | None = attrs.field(default=None, validator=optional(_COUNT))
    """The id that ends a document."""
    tokenizer: Mapping[str, Any] | None = None
    """The table that names the tokenizer; paths in it are relative to the folder."""
    tokenizer_fingerprint: str | None = None
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


def smallest_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """uint16 if all ids below ``vocab_size`` fit, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def read_header(file: Path) -> TokenHeader:
    """Read an ``index.json`` or the JSON beside a ``.bin`` file.

    Raises:
        ConfigError: it is not one, or one of a later version.
    """
    try:
        content = json.loads(read_regular_file(file, _MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: it is not JSON ({str(error)[:200]})") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ConfigError(f'{file} does not describe token files: it lacks "format": "{FORMAT}"')
    version = content.pop("version", None)
    if version != VERSION:
        raise ConfigError(f"{file} has version {version!r} of the format; this forge-plugins-data reads {VERSION}")
    try:
        return structure(content, TokenHeader, Catalog([]))
    except InvalidError as error:
        raise ConfigError(f"{file} is damaged: {'; '.join(map(str, error.problems[:3]))}") from error


def write_header(file: Path, header: TokenHeader) -> None:
    """Write it so that it is there whole or not at all."""
    content = {"format": FORMAT, "version": VERSION} | attrs.asdict(header)
    write_atomically(file, json.dumps(content, indent=2) + "\n")


def write_atomically(file: Path, content: str) -> None:
    """Replace ``file`` by ``content`` in one moment, after it has reached the disk."""
    partial = file.with_name(file.name + ".partial")
    partial.unlink(missing_ok=True)  # of an interruption; or a link, which is not followed
    with partial.open("x", encoding="utf-8") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    partial.replace(file)


def map_shard(folder: Path, header: TokenHeader, shard: Shard) -> np.ndarray:
    """The ids of a ``.bin`` file ``(N,)``, memory-mapped and read-only.

    Raises:
        ConfigError: the file is missing, or not of the size that the JSON says.
    """
    file = folder / shard.file
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing, which the JSON beside it lists; copy it there, or prepare the data again"
        )
    expected, actual = shard.tokens * header.itemsize, file.stat().st_size
    if actual != expected:
        what = "truncated" if actual < expected else "longer than it should be"
        raise ConfigError(
            f"{file} is {what}: {shard.tokens} tokens of {header.dtype} are {expected} bytes, and it has {actual}. "
            "Copy it again; or remove it and run the same 'forge data prepare' again, which makes it anew."
        )
    if shard.tokens == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=header.dtype)
    mapped = np.memmap(file, dtype=np.dtype(header.dtype).newbyteorder("<"), mode="r")
    return mapped.view(np.ndarray)  # slicing the subclass costs microseconds a row
