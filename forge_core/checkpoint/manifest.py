"""The manifest of a checkpoint: what was written, so that anything else is noticed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import xxhash
from attrs.validators import and_, deep_mapping, ge, instance_of

from forge_core.checkpoint.fsync import naming, write_durably
from forge_core.config.regular_file import read_regular_file

FORMAT = 2
FILE_NAME = "manifest.json"
_MAX_BYTES = 2**26
"""Some hundred thousand files."""

NEEDED = (".metadata", "state.json")
"""Files without which there is no checkpoint."""

_IS_COUNT = and_(instance_of(int), ge(0))


def _are_files(_: object, attribute: object, files: object) -> None:
    if not isinstance(files, Mapping):
        raise TypeError("its files are no table")
    for name, entry in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it names {name!r}, which is outside the checkpoint")
        if not isinstance(entry, Mapping) or type(entry.get("bytes")) is not int or "xxh3_128" not in entry:
            raise TypeError(f"it does not say what {name} is")
    if missing := [name for name in NEEDED if name not in files]:
        raise ValueError(f"it does not name {' and '.join(missing)}")


@attrs.frozen(kw_only=True)
class Manifest:
    """Written last, from what was written before it."""

    step: int = attrs.field(validator=_IS_COUNT)
    tokens: int = attrs.field(validator=_IS_COUNT)
    mesh: Mapping[str, int] = attrs.field(validator=deep_mapping(instance_of(str), _IS_COUNT))
    """Degrees of the axes it was written with; any other layout can read it."""
    versions: Mapping[str, str] = attrs.field(validator=deep_mapping(instance_of(str), instance_of(str)))
    """Versions of Forge, torch, and every plugin, by distribution."""
    files: Mapping[str, Mapping[str, Any]] = attrs.field(validator=_are_files)
    """``{"bytes": …, "xxh3_128": …}`` by path below the checkpoint's folder."""
    written: str = attrs.field(validator=instance_of(str))
    """When, in ISO 8601, with the zone."""
    metrics: Mapping[str, float] = attrs.field(
        factory=dict, validator=deep_mapping(instance_of(str), instance_of((int, float)))
    )
    """The last evaluation's values, by which the best checkpoints are kept."""

    @property
    def n_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


class DamagedError(Exception):
    """A checkpoint is not what was written. The message says how, in a phrase."""


class NewerFormatError(DamagedError):
    """A checkpoint is whole as far as that can be told, and a later version of Forge has written it."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Into ``folder``, flushed, with a digest of itself."""
    body = {"format": FORMAT, **attrs.asdict(manifest)}
    write_durably(folder / FILE_NAME, json.dumps({**body, "sha256": _own_digest(body)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``, whose other files are not looked at.

    Raises:
        DamagedError: it cannot be read, has been changed, is of another format, or of another step than the folder's
            name says.
        NewerFormatError: it has not been changed, and is of a later format.
    """
    file = folder / FILE_NAME
    try:
        if folder.is_symlink():
            raise DamagedError("it is a link, not a folder of its own")
        if file.is_symlink():
            raise DamagedError(f"{FILE_NAME} is not a file of its own")
        text = read_regular_file(file, _MAX_BYTES, follow_link=False)
    except OSError as error:
        raise DamagedError(f"{FILE_NAME} cannot be read ({error.strerror})") from error
    manifest = parse_manifest(text)
    named = re.fullmatch(r"step_(\d+)", folder.name)
    if named and int(named[1]) != manifest.step:
        raise DamagedError(f"{FILE_NAME} says that it is of step {manifest.step}")
    return manifest


def parse_manifest(text: bytes) -> Manifest:
    """Read a manifest. Raises as ``read_manifest`` does."""
    try:
        body = json.loads(text)
        is_as_written, found = body.pop("sha256", None) == _own_digest(body), body.pop("format")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedError(f"{FILE_NAME} is not a manifest") from error
    if found != FORMAT:
        newer = is_as_written and isinstance(found, int) and found > FORMAT  # no flipped bit
        kind = NewerFormatError if newer else DamagedError
        raise kind(f"it has format {found}, this version of Forge reads format {FORMAT}")
    if not is_as_written:
        raise DamagedError(f"the content of {FILE_NAME} is not what was written")
    try:
        return Manifest(**body)
    except (RecursionError, TypeError, ValueError) as error:
        raise DamagedError(f"{FILE_NAME} is not a manifest: {str(error)[:200]}") from error


def damage(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Find the first problem with some files of a checkpoint, given their entries in its manifest, or ``None``."""
    for name, entry in files.items():
        if problem := _misfit(folder, name, entry):
            return problem
        try:
            digest = describe_file(folder / name)["xxh3_128"]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if digest != entry["xxh3_128"]:
            return f"the content of {name} is not what was written"
    return None


def visible_damage(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Same as ``damage``, as far as names and sizes tell: nothing is read, however large the files are."""
    return next((problem for name, entry in files.items() if (problem := _misfit(folder, name, entry))), None)


def _misfit(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    file = folder / name
    try:
        found = file.stat(follow_symlinks=False)
        is_own = stat.S_ISREG(found.st_mode) and file.resolve(strict=True) == folder.resolve(strict=True) / name
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except ValueError:  # a name that no file can have
        is_own = False
    if not is_own:
        return f"{name} is not a file of its own"
    size = found.st_size
    return f"{name} has {size} bytes, the manifest says {entry['bytes']}" if size != entry["bytes"] else None


def describe_files(folder: Path, files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Entries of a manifest, by path below ``folder``."""
    return {file.relative_to(folder).as_posix(): describe_file(file) for file in files}


def describe_file(file: Path) -> dict[str, Any]:
    """XXH3 finds what disks and networks do to files, as fast as they are read; it is no protection from people."""
    with naming(file), file.open("rb", buffering=0) as content:
        digest = hashlib.file_digest(content, xxhash.xxh3_128)
        return {"bytes": content.tell(), "xxh3_128": digest.hexdigest()}


def as_size(n_bytes: int) -> str:
    """Bytes as people write them, ``"1.5 GiB"``."""
    size, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def lack_of_room(folder: Path, n_bytes: int, what: str = "the checkpoint") -> str:
    """Say that the disk of ``folder``, which need not be there yet, has less room than ``n_bytes``; nothing if it has
    enough."""
    free = shutil.disk_usage(next(one for one in (folder, *folder.absolute().parents) if one.exists())).free
    return f"{folder} has {as_size(free)} free, and {what} needs {as_size(n_bytes)}; make room" * (free < n_bytes)


def _own_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
