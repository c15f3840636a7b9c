"""Where images are that are not read yet."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
from PIL import Image

from forge_plugins_vlm.contracts.image_processor import AtLeast
from forge_plugins_vlm.contracts.vision_encoder import Grid
from forge_plugins_vlm.images.picture import open_picture, size_of


class Reference(ABC):
    """An image that can be read when it is needed, from any thread."""

    kind: ClassVar[str] = "image"
    """For messages."""

    @property
    @abstractmethod
    def where(self) -> str:
        """For messages."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What it is told by in a fingerprint: the same on any machine that has the same data.

        Raises:
            OSError: it is not there.
        """

    @abstractmethod
    def open(self, at_least: AtLeast | None = None) -> Image.Image:
        """Decode it.

        Args:
            at_least: as ``open_picture`` takes it.

        Raises:
            OSError: it cannot be read.
        """

    @abstractmethod
    def size(self) -> Grid:
        """Height and width, without decoding it if that can be.

        Raises:
            OSError: it cannot be read.
        """


class UnreadableError(Exception):
    """An image, or a video, cannot be read; the message names it, with the reason."""

    def __init__(self, reference: Reference, error: OSError) -> None:
        super().__init__(f"the {reference.kind} {reference.where} cannot be read: {error.strerror or error}")


class EncodedPicture(Reference):
    """An image whose file, as PNG or JPEG, can be had; or a video, whose file can be had as well."""

    @abstractmethod
    def content(self) -> bytes:
        """The file of it.

        Raises:
            OSError: it cannot be read.
        """

    def open(self, at_least: AtLeast | None = None) -> Image.Image:
        return open_picture(self.content(), at_least)

    def size(self) -> Grid:
        return size_of(self.content())


@attrs.frozen
class PictureFile(EncodedPicture):
    """A file."""

    path: Path
    name: str
    """As the data have it."""

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.path.stat().st_size}"

    def content(self) -> bytes:
        return self.path.read_bytes()

    def size(self) -> Grid:
        return size_of(self.path)


@attrs.frozen
class TarMember(EncodedPicture):
    """A member of a tar that is not compressed."""

    tar: Path
    name: str
    start: int
    """Its first byte in the tar."""
    length: int

    @property
    def where(self) -> str:
        return f"{self.name} of {self.tar}"

    @property
    def identity(self) -> str:
        return f"{self.tar.name}:{self.name}:{self.length}"

    def content(self) -> bytes:
        with self.tar.open("rb") as handle:
            handle.seek(self.start)
            found = handle.read(self.length)
        if len(found) < self.length:
            raise OSError(f"it ends after {len(found)} of {self.length} bytes")
        return found


@attrs.frozen
class ParquetCell(EncodedPicture):
    """A cell of a Parquet file, or one of the images in it."""

    file: Path
    group: int
    """Row group."""
    row: int
    """In its group."""
    column: str
    index: int | None

    @property
    def where(self) -> str:
        which = "" if self.index is None else f", image {self.index + 1}"
        return f"row {self.row + 1} of group {self.group + 1} of {self.file}, column {self.column}{which}"

    @property
    def identity(self) -> str:
        return f"{self.file.name}:{self.file.stat().st_size}:{self.group}:{self.row}:{self.column}:{self.index}"

    def content(self) -> bytes:
        value = _column(self.file, self.group, self.column)[self.row]
        return _bytes_of((value if self.index is None else value[self.index]).as_py(), self.file.parent)


@functools.lru_cache(maxsize=8)
def _column(file: Path, group: int, column: str) -> Any:
    """A column of a row group, which is kept, as neighbours are often read."""
    import pyarrow as pa  # type: ignore[import-untyped]  # other formats do without
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        return pq.ParquetFile(file).read_row_group(group, columns=[column]).column(column)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error


@attrs.frozen
class DatasetCell(EncodedPicture):
    """A cell of a data set of ``datasets``, or one of the images in it."""

    dataset: Any = attrs.field(repr=False)
    """In the format ``arrow``, which decodes nothing."""
    words: str
    """Names the data set."""
    row: int
    column: str
    index: int | None

    @property
    def where(self) -> str:
        which = "" if self.index is None else f", image {self.index + 1}"
        return f"row {self.row + 1} of {self.words}, column {self.column}{which}"

    @property
    def identity(self) -> str:
        return f"{self.row}:{self.column}:{self.index}"

    def content(self) -> bytes:
        value = self.dataset[self.row].column(self.column)[0]
        return _bytes_of((value if self.index is None else value[self.index]).as_py(), Path())


@attrs.frozen(eq=False)
class PictureInMemory(EncodedPicture):
    """The file of an image that was read with its row."""

    value: bytes | Mapping[str, Any] = attrs.field(repr=False)
    """As ``datasets`` gives an image that it does not decode."""
    place: str
    """The row, and its column."""

    @property
    def where(self) -> str:
        return self.place

    @property
    def identity(self) -> str:
        return self.place

    def content(self) -> bytes:
        return _bytes_of(self.value, Path())


@attrs.frozen(eq=False)
class PlacedPicture(Reference):
    """An image without a file: ``place`` names it in messages, and in a fingerprint."""

    place: str

    @property
    def where(self) -> str:
        return self.place

    @property
    def identity(self) -> str:
        return self.place


@attrs.frozen(eq=False)
class DecodedPicture(PlacedPicture):
    """An image that is there."""

    image: Image.Image = attrs.field(repr=False)

    def open(self, at_least: AtLeast | None = None) -> Image.Image:
        return self.image

    def size(self) -> Grid:
        return self.image.height, self.image.width


def _bytes_of(value: Any, folder: Path) -> bytes:
    """Of a cell as ``datasets`` writes images: their bytes, or the path of a file."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return (folder / value).read_bytes()
    if not isinstance(value, bytes):
        raise OSError("it has neither bytes nor a path")
    return value
