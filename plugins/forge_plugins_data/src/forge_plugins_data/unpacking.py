"""Files as they were before they were compressed."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from forge_core.errors import ConfigError

COMPRESSED = (".gz", ".zst")


@contextmanager
def open_unpacked(file: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked if its name ends as one of ``COMPRESSED``.

    Raises:
        ConfigError: it cannot be read, or what is compressed is damaged.
    """
    try:
        if file.suffix == ".zst":
            with _zstd(file) as stream:
                yield stream
        elif file.suffix == ".gz":
            with gzip.open(file) as handle:
                yield handle  # type: ignore[misc]  # a GzipFile reads like any binary file
        else:
            with file.open("rb", buffering=2**20) as handle:
                yield handle
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _zstd(file: Path) -> Iterator[IO[bytes]]:
    # a fifth of a second that other files need not wait for
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

    try:
        with pa.input_stream(str(file), compression="zstd") as stream:
            yield io.BufferedReader(stream, buffer_size=2**20)
    except pa.ArrowException as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
