"""Rows of WebDataset: members of a tar whose names are the same up to their first dot are one."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

from forge_core.errors import ConfigError
from forge_plugins_data.file_selection import SelectedFile
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.references import TarMember
from forge_plugins_vlm.data.rows import PICTURES, Row

_VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov")


def read_tar_rows(file: SelectedFile, config: ImageTextConfig) -> Iterator[Row]:
    """A row for each group of members: the keys of its ``.json``, its ``.txt`` as the caption, its images, and, where
    captions have videos, its videos.

    A single image is ``image``, and several are an array; both names, ``image`` and ``images``, have them, in the order
    in which an array of the ``.json`` names them, or else in that of the tar.

    Raises:
        ConfigError: the tar is damaged or compressed; a member is not JSON, or not UTF-8.
    """
    try:
        with tarfile.open(file.path, "r:") as tar:
            members = [member for member in tar if member.isfile()]
            for number, (key, group) in enumerate(groupby(members, _key), 1):
                yield _row(tar, file, key, [*group], number, config)
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"cannot read the tar {file.path}: {error}; a compressed one is unpacked first") from error


def _row(
    tar: tarfile.TarFile,
    file: SelectedFile,
    key: str,
    group: list[tarfile.TarInfo],
    number: int,
    config: ImageTextConfig,
) -> Row:
    where = f"{key} of {file.path}"
    record: dict[str, Any] = {}
    pictures: dict[str, TarMember] = {}
    videos: dict[str, TarMember] = {}
    for member in group:
        ending = PurePosixPath(member.name).suffix.lower()
        if ending in (*PICTURES, *_VIDEOS):
            found = pictures if ending in PICTURES else videos
            found[member.name] = TarMember(file.path, member.name, member.offset_data, member.size)
        elif ending in (".json", ".txt"):
            text = _text(tar, member, where)
            record |= _object(text, where) if ending == ".json" else {config.caption_field: text.strip()}

    files = pictures | videos

    def named(name: object) -> TarMember | None:
        candidates = (name, f"{key}.{name}", str(PurePosixPath(key).parent / str(name)))
        return next((files[one] for one in candidates if isinstance(one, str) and one in files), None)

    if pictures:
        images = _in_order(record.get("images", record.get(config.image_field)), named) or [*pictures.values()]
        own = images[0] if len(images) == 1 else images
        if config.format != "interleaved":  # where null says which place has none
            record["images"] = images
        record[config.image_field] = own
    if videos and config.video_field:
        record[config.video_field] = [*videos.values()]

    def find(name: str) -> TarMember:
        if (found := named(name)) is None:
            raise ConfigError(f"{where} has no image or video {name!r}; it has {', '.join(files) or 'none'}")
        return found

    return Row(record, where, f"{file.relative}:{number}", find)


def _in_order(said: object, named: Callable[[object], TarMember | None]) -> list[TarMember]:
    """The members that an array names, if it names members alone."""
    found = [named(one) for one in said] if isinstance(said, list) else []
    members = [one for one in found if one is not None]
    return members if len(members) == len(found) else []


def _key(member: tarfile.TarInfo) -> str:
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/" * bool(folder) + name.partition(".")[0]


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> str:
    handle = tar.extractfile(member)
    assert handle is not None, "it is a file"
    try:
        return handle.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {member.name} is not UTF-8: {error}") from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: its .json is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: its .json must be an object")
    return found
