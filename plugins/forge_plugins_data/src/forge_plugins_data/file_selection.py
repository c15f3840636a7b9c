"""Which files a configuration means by its paths and patterns."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

import attrs

from forge_core.errors import ConfigError, nearest
from forge_plugins_data.unpacking import COMPRESSED


@attrs.frozen
class SelectedFile:
    """A file, and its name within the folder or glob that it was found by."""

    relative: str
    """With forward slashes: the same on any machine that has the same folder somewhere."""
    path: Path


def select_files(
    paths: str | Sequence[str], pattern: str | Sequence[str], exclude: Sequence[str] = ()
) -> list[SelectedFile]:
    """The files that ``paths`` name, in the order of ``paths`` and sorted within each; each file once.

    Args:
        paths: folders, files and globs; ``~`` is expanded, and ``{stdlib}`` is the folder of the standard library.
        pattern: globs that choose among the files of a folder. A file named or matched by ``paths`` needs no pattern.
        exclude: globs for the relative names of files to leave out.

    Raises:
        ConfigError: a path does not exist, or nothing is left of it; a file is a link to nothing; ``exclude`` names a
            file that is not there.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    selected: dict[Path, SelectedFile] = {}
    names: set[str] = set()
    for path in [paths] if isinstance(paths, str) else paths:
        found = _find(path, patterns, exclude)
        names.update(one.relative for one in found)
        kept = [one for one in found if not any(_fits(one.relative, skip) for skip in exclude)]
        if not kept:
            raise ConfigError(f"exclude leaves none of the {len(found)} files that path = {path!r} stands for")
        for one in sorted(kept, key=lambda one: one.relative):
            _refuse_link_to_nothing(one.path, path)
            selected.setdefault(one.path.resolve(), one)
    for skip in exclude:
        _refuse_idle_name(skip, names)
    return list(selected.values())


def _refuse_idle_name(skip: str, names: Collection[str]) -> None:
    """A glob may find nothing, as folders of tests do not come with every Python; a name that does is a mistake."""
    if glob.has_magic(skip) or skip in names:
        return
    near = next((name for name in sorted(names) if skip.endswith(f"/{name}")), None)
    near = near or nearest(skip, names)
    hint = f"; did you mean {near!r}?" if near else "; take it out"
    raise ConfigError(f"exclude = {skip!r} is none of the {len(names)} files, named as they are within path{hint}")


def count_left_out(paths: Sequence[str], selected: Sequence[SelectedFile]) -> dict[str, int]:
    """How many files of the folders among ``paths`` are not in ``selected``, by their ending, the commonest first.
    Hidden ones are not counted."""
    taken = {file.path.resolve() for file in selected}
    endings: Counter[str] = Counter()
    for folder in {_location(path).resolve() for path in paths if is_folder(path)}:
        endings.update(_ending(file.path) for file in _matches(folder, "**/*") if file.path.resolve() not in taken)
    return dict(endings.most_common())


def _ending(file: Path) -> str:
    """``.tar.gz`` of ``x.tar.gz``: what is compressed has two."""
    return "".join(file.suffixes[-2:]) if file.suffix in COMPRESSED else file.suffix


def is_folder(path: str) -> bool:
    """Return whether a path of a configuration names a folder, among whose files a pattern chooses."""
    return _location(path).is_dir()


def _location(path: str) -> Path:
    return expanded(path.replace("{stdlib}", sysconfig.get_path("stdlib")))


def expanded(path: str) -> Path:
    """The place that a path of a configuration means: ``~`` and ``~user`` are home directories.

    Raises:
        ConfigError: there is no such user, or the system does not take the name, or does not let one look.
    """
    try:
        location = Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            location.stat()  # from Python 3.14 on, `is_file` raises nothing
    except OSError as error:
        raise ConfigError(f"the path {path!r} cannot be looked at: {error.strerror}") from error
    except RuntimeError as error:
        raise ConfigError(f"the path {path!r} begins with a user whom this machine does not have") from error
    return location


def refuse_idle_pattern(paths: str | Sequence[str], pattern: str | None) -> None:
    """
    Raises:
        ConfigError: there is a pattern, and no folder among whose files it could choose.
    """
    each = (paths,) if isinstance(paths, str) else tuple(paths)
    if pattern is not None and not any(map(is_folder, each)) and select_files(each, ()):
        raise ConfigError(
            f"pattern = {pattern!r} has no effect: it chooses among the files of a folder, and path = {paths!r} names "
            "none; remove it"
        )


def refuse_missing(path: str) -> None:
    """
    Raises:
        ConfigError: ``path`` is neither a pattern nor the name of anything that exists.
    """
    location = _location(path)
    if location.exists() or glob.has_magic(str(location)):
        return
    _refuse_link_to_nothing(location, path)
    near = get_close_matches(location.name, _names_in(location.parent), n=1)
    hint = f" Did you mean {location.parent / near[0]}?" if near else ""
    raise ConfigError(f"path = {path!r}: there is no file or folder {location}.{hint}")


def _refuse_link_to_nothing(file: Path, path: str) -> None:
    """Its text would be missing without a word."""
    if _is_link_to_nothing(file):
        target = file.parent / file.readlink()
        raise ConfigError(f"path = {path!r}: {file} is a link to {target}, which is not there; fetch or exclude it")


def _is_link_to_nothing(file: Path) -> bool:
    return file.is_symlink() and not file.exists()


def _find(path: str, patterns: Sequence[str], exclude: Sequence[str]) -> list[SelectedFile]:
    location = _location(path)
    if location.is_file():
        return [SelectedFile(location.name, location)]
    if location.is_dir():
        return _find_in_folder(location, patterns, exclude)
    if glob.has_magic(str(location)):
        return _find_by_glob(location, exclude)
    refuse_missing(path)
    raise ConfigError(f"path = {path!r} is neither a file nor a folder, but something like a pipe or a device")


def _find_in_folder(folder: Path, patterns: Sequence[str], exclude: Sequence[str]) -> list[SelectedFile]:
    for pattern in patterns:
        _refuse_unreadable(folder, pattern, exclude)
    files = list({file for pattern in patterns for file in _matches(folder, pattern)})
    if files:
        return files
    endings = Counter(file.suffix for file in folder.rglob("*") if file.is_file() and file.suffix)
    wanted = " or ".join(map(repr, patterns))
    if not endings:
        raise ConfigError(f"the folder {folder} has no files that match {wanted}, nor any other with an ending")
    ending, count = endings.most_common(1)[0]
    raise ConfigError(
        f"the folder {folder} has no files that match {wanted}; it has {count} ending in {ending} "
        f'(pattern = "**/*{ending}")'
    )


def _find_by_glob(location: Path, exclude: Sequence[str]) -> list[SelectedFile]:
    parts = location.parts
    literal = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root, rest = Path(*parts[:literal]), Path(*parts[literal:])
    _refuse_unreadable(root, str(rest), exclude)
    files = _matches(root, str(rest))
    if not files:
        raise ConfigError(f"no file matches {str(location)!r}")
    return files


def _refuse_unreadable(root: Path, pattern: str, exclude: Sequence[str]) -> None:
    """A glob passes over a folder that it may not read, and the text in it would be missing without a word."""
    parts = pattern.split("/")
    for depth, wanted in enumerate(parts):
        mode = os.R_OK | os.X_OK if glob.has_magic(wanted) else os.X_OK  # a name is found without a list of names
        above = "/".join([*parts[:depth], ""])
        for name in ("", *glob.glob(above, root_dir=root, recursive=True)):  # noqa: PTH207
            folder = root / name
            if os.access(folder, mode) or not folder.exists():
                continue
            if not any(_fits(f"{name.rstrip('/')}//", skip) for skip in exclude):  # not all that is in it, so deep
                raise ConfigError(
                    f"there is no permission to read the folder {folder}, where files may match {pattern!r}; allow it, "
                    "or choose a pattern that does not look there, or exclude it, as 'folder/**'"
                )


def _matches(root: Path, pattern: str) -> list[SelectedFile]:
    # Unlike Path.glob, this follows links to folders and leaves hidden files out.
    names = glob.glob(pattern, root_dir=root, recursive=True)  # noqa: PTH207
    files = [SelectedFile(Path(name).as_posix(), root / name) for name in names]
    return [one for one in files if one.path.is_file() or _is_link_to_nothing(one.path)]


def _fits(name: str, pattern: str) -> bool:
    """Return whether a glob would find this name: ``**`` stands for any number of folders, ``*`` stays within one."""

    def fits(parts: Sequence[str], wanted: Sequence[str]) -> bool:
        if not wanted:
            return not parts
        if wanted[0] == "**":
            return any(fits(parts[skipped:], wanted[1:]) for skipped in range(len(parts) + 1))
        return bool(parts) and fnmatchcase(parts[0], wanted[0]) and fits(parts[1:], wanted[1:])

    return fits(name.split("/"), pattern.split("/"))


def _names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
