"""Whether a file is text: everything else would be trained on without a word."""

from __future__ import annotations

from pathlib import Path

from forge_core.errors import ConfigError

JSON_LINES = (".jsonl", ".ndjson")
AS_IT_IS = "To train on its bytes as they are, set binary = true (--binary)."
"""The end of a sentence about a file that is not text."""

_UNPACK = "unpack it first"
_CONVERT = "convert it to text, JSON Lines or Parquet"
_CONTAINERS = (
    (0, b"PAR1", "a Parquet file", "'forge data prepare' reads it, if its name ends in .parquet"),
    (0, b"ARROW1\0", "an Arrow file", "write it as Parquet, which 'forge data prepare' reads"),
    (0, b"\xff\xff\xff\xff", "an Arrow stream", "write it as Parquet, which 'forge data prepare' reads"),
    (0, b"Obj\x01", "an Avro file", _CONVERT),
    (0, b"\x93NUMPY", "an array of numpy", "the data source token_files reads token ids from .npy"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    (0, b"SQLite format 3\0", "an SQLite database", _CONVERT),
    (0, b"\x1f\x8b", "compressed by gzip", "it is unpacked if its name ends in .gz"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", "it is unpacked if its name ends in .zst"),
    (0, b"\xfd7zXZ\0", "compressed by xz", _UNPACK),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4", _UNPACK),
    (4, b"1AY&SY", "compressed by bzip2", _UNPACK),
    (0, b"PK\x03\x04", "a zip archive", _UNPACK),
    (0, b"PK\x05\x06", "a zip archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (0, b"%PDF-", "a PDF", _CONVERT),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", "exclude it"),
    (0, b"\xff\xd8\xff", "a JPEG image", "exclude it"),
    (0, b"GIF87a", "a GIF image", "exclude it"),
    (0, b"GIF89a", "a GIF image", "exclude it"),
    (0, b"II*\0", "a TIFF image", "exclude it"),
    (0, b"MM\0*", "a TIFF image", "exclude it"),
    (8, b"WEBP", "a WebP image", "exclude it"),
    (8, b"WAVEfmt", "a sound", "exclude it"),
    (0, b"OggS", "a sound", "exclude it"),
    (0, b"fLaC", "a sound", "exclude it"),
    (4, b"ftyp", "a film or image", "exclude it"),
    (0, b"\x7fELF", "a program", "exclude it"),
)
"""Where a file of each kind has which bytes, what it is, and what reads it."""


def refuse_json_lines(file: Path) -> None:
    """Raises:
    ConfigError: the file's name says that it is JSON Lines, whose syntax would be trained on.
    """
    endings = [suffix.lower() for suffix in file.suffixes[-2:]]
    if any(ending in JSON_LINES for ending in endings):
        raise ConfigError(
            f"{file} is JSON Lines, and its syntax would be trained on. 'forge data prepare {file} --output tokens "
            "--text-field text' takes the texts out of it. To train on the JSON itself, set binary = true."
        )


def refuse_what_is_no_text(content: bytes, where: str) -> None:
    """Raises:
    ConfigError: ``content``, which has been unpacked, is no text by its first bytes, or has a NUL byte.
    """
    for offset, magic, what, remedy in _CONTAINERS:
        if content.startswith(magic, offset):
            raise ConfigError(f"{where} is {what}, not text: {remedy}. {AS_IT_IS}")
    position = content.find(b"\0")
    if position >= 0:
        raise ConfigError(
            f"{where} has a NUL byte, which text has not, at byte {position} (from 0): exclude the file, or convert it "
            f"to UTF-8. {AS_IT_IS}"
        )
