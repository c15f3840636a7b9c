"""Rows of files and data sets: what a line, a row or a member says, with its images left where they are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from forge_core.contracts.data_source import Split
from forge_core.errors import ConfigError
from forge_plugins_data.documents import read_records
from forge_plugins_data.file_selection import SelectedFile, is_folder, refuse_idle_pattern, select_files
from forge_plugins_data.in_memory import unit_hash
from forge_plugins_data.plain_text import JSON_LINES
from forge_plugins_data.unpacking import COMPRESSED
from forge_plugins_data.windows import require_held_out
from forge_plugins_vlm.data.config import ImageTextConfig, expanded
from forge_plugins_vlm.data.references import EncodedPicture, PictureFile

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_TABLES = (
    "**/*.json",
    *(f"**/*{ending}{packed}" for ending in JSON_LINES for packed in ("", *COMPRESSED)),
    "**/*.csv",
    "**/*.parquet",
    "**/*.tar",
)
_FEW = 80
"""Characters of a wrong value that a message shows."""


@attrs.frozen
class Row:
    """What a line, a row or a member says."""

    record: Mapping[str, Any]
    """Images are references already, or the names of files."""
    where: str
    """For messages."""
    name: str
    """The file's relative name, and the number in it."""
    find: Callable[[str], Path | EncodedPicture]
    """From a name in the record to a file, or to what is beside it in a tar."""

    def picture(self, value: object, kind: str = "an image") -> EncodedPicture:
        """The image that a value of the record is.

        Raises:
            ConfigError: it is none.
        """
        if isinstance(value, Mapping):  # as some write an image in messages: {"url": …} or {"path": …}
            value = next((value[key] for key in ("path", "url") if isinstance(value.get(key), str)), value)
        if isinstance(value, EncodedPicture):
            return value
        if not isinstance(value, str) or not _may_be_a_name(value):
            raise ConfigError(f"{self.where}: {kind} must be the name of a file, it is {shown(value)}")
        if value.startswith(("http://", "https://", "data:")):
            raise ConfigError(f"{self.where}: {shown(value)} is an address; download it, and name the file")
        found = self.find(value)
        return found if isinstance(found, EncodedPicture) else PictureFile(found, value)

    def video(self, value: object) -> Path | EncodedPicture:
        """The video that a value of the record is: a file, a folder of frames, or what has the bytes of a file.

        Raises:
            ConfigError: it is none.
        """
        found = self.picture(value, "a video")
        return found.path if isinstance(found, PictureFile) else found

    def text(self, value: object, what: str) -> str:
        """A text of the record.

        Raises:
            ConfigError: it is none.
        """
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {what} must be text, it is {shown(value)}")
        return value

    def field(self, name: str, hint: str = "") -> Any:
        """What the record has under a name.

        Raises:
            ConfigError: nothing.
        """
        if name not in self.record:
            raise ConfigError(f"{self.where} has no {name!r}; its keys are {', '.join(self.record)}{hint}")
        return self.record[name]

    def listed(self, name: str) -> list[Any]:
        """An array of the record.

        Raises:
            ConfigError: it has none of this name.
        """
        value = self.field(name)
        if not isinstance(value, list):
            raise ConfigError(f"{self.where}: {name!r} must be an array, it is {shown(value)}")
        return value


def shown(value: object) -> str:
    """The beginning of a value, for a message."""
    return json.dumps(value, default=str)[:_FEW]


def chosen_rows(config: ImageTextConfig, split: Split) -> Iterator[Row]:
    """The rows of a split, in the order of the files' relative names. Which one a row is in depends on its file's name
    and its number alone.

    Raises:
        ConfigError: no such files, or data set; one that is damaged; nothing is held out.
    """
    require_held_out(config.validation, split)
    for row in islice(_rows(config), config.max_rows):
        is_held_out = unit_hash(row.name) < config.validation
        if split == "all" or is_held_out == (split == "validation"):
            yield row


def _rows(config: ImageTextConfig) -> Iterator[Row]:
    if config.dataset is not None:
        from forge_plugins_vlm.data.hub_rows import read_hub_rows  # files do without

        yield from read_hub_rows(config.dataset)
        return
    for file in _files(config):
        yield from read_rows(file, config)


def _files(config: ImageTextConfig) -> list[SelectedFile]:
    assert config.path is not None, "one of the two is given"
    paths = expanded(config.path)
    refuse_idle_pattern(paths, config.pattern)
    if config.pattern is not None:
        return select_files(paths, config.pattern, config.exclude)
    pictures = tuple(f"**/*{ending}" for ending in PICTURES)
    found: list[SelectedFile] = []
    for path in paths:
        try:
            found += select_files(path, _TABLES, config.exclude)
        except ConfigError:
            if config.format != "captions" or not is_folder(path):
                raise
            found += select_files(path, pictures, config.exclude)
    return list({file.path.resolve(): file for file in found}.values())


def read_rows(file: SelectedFile, config: ImageTextConfig) -> Iterator[Row]:
    """The rows of a file, by its ending.

    Raises:
        ConfigError: it is damaged, or of none of the kinds that are read.
    """
    folder = file.path.parent if config.images is None else Path(config.images).expanduser()

    def find(name: str) -> Path:
        return folder / name

    ending = (file.path.with_suffix("") if file.path.suffix in COMPRESSED else file.path).suffix.lower()
    if ending == ".tar":
        from forge_plugins_vlm.data.tar_rows import read_tar_rows

        yield from read_tar_rows(file, config)
    elif ending == ".parquet":
        from forge_plugins_vlm.data.parquet_rows import read_parquet_rows

        yield from read_parquet_rows(file, find)
    elif ending in PICTURES:
        yield _picture_with_text(file, config)
    elif ending in (".json", ".csv", *JSON_LINES):
        for number, (record, where) in enumerate(_records(file.path, ending), 1):
            yield Row(record, str(where), f"{file.relative}:{number}", find)
    else:
        raise ConfigError(f"{file.path} is none of {', '.join(['.json', *JSON_LINES, '.csv', '.parquet', '.tar'])}")


def _records(path: Path, ending: str) -> Iterator[tuple[Mapping[str, Any], object]]:
    if ending in JSON_LINES:
        yield from read_records(path)
        return
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if ending == ".csv":
        yield from _csv_records(path, content)
        return
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; JSON Lines end in .jsonl") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path} must be an array of objects, it is {shown(found)}")
    for number, record in enumerate(found, 1):
        if not isinstance(record, dict):
            raise ConfigError(f"{path}: entry {number} must be an object, it is {shown(record)}")
        yield record, f"entry {number} of {path}"


def _csv_records(path: Path, content: str) -> Iterator[tuple[Mapping[str, Any], object]]:
    lines = csv.DictReader(io.StringIO(content, newline=""))
    number = 0
    try:
        for number, record in enumerate(lines, 1):
            where = f"row {number} of {path}"
            if None in record:
                raise ConfigError(f"{where} has more values than the first line has names; quote values with commas")
            yield record, where
    except csv.Error as error:
        raise ConfigError(f"row {number + 1} of {path} is not CSV: {error}") from error


def _may_be_a_name(value: str) -> bool:
    """Whether a file can be called so: names are not empty, and have neither a zero nor half a character."""
    return bool(value) and "\0" not in value and not any("\ud800" <= one <= "\udfff" for one in value)


def _picture_with_text(file: SelectedFile, config: ImageTextConfig) -> Row:
    beside = file.path.with_suffix(".txt")
    try:
        caption = beside.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {beside}, the caption of {file.path.name}: {reason}") from error
    picture = PictureFile(file.path, file.relative)
    record = {config.image_field: picture, config.caption_field: caption}
    return Row(record, str(file.path), f"{file.relative}:1", lambda name: file.path.parent / name)
