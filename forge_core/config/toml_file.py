"""A TOML file and the files that it extends, as one plain table that remembers where each value was written."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from forge_core.config.problems import ConfigProblems, InvalidError, KeyPath, Location, Problem, key_text
from forge_core.config.regular_file import read_regular_file
from forge_core.config.toml_positions import key_lines
from forge_core.config.toml_text import MAX_BYTES, parse_toml, refuse_depth, toml_tokens
from forge_core.errors import ConfigError, nearest
from forge_core.registry.plugin_files import trust

MAX_FILES = 32
"""Files of one configuration, with the files that it extends."""
_FILES: KeyPath = ("plugins", "files")
RESOLVED = "job.toml"
"""The file of a resolved job, in a run's directory and in checkpoints."""
_OF_FILES = ("extends", "unset")
"""Keys at the root of a file about files; the others are a job's."""
MAX_PLUGIN_BYTES = 2**18
"""Bytes of a plugin in a file."""


@attrs.frozen
class Document:
    """A configuration before it is typed: plain data, and the place of every key."""

    table: dict[str, Any]
    locations: dict[KeyPath, Location]

    def locate(self, path: KeyPath) -> Location:
        """Where ``path`` was written, or the nearest table around it that was written anywhere."""
        while path not in self.locations:
            path = path[:-1]
        return self.locations[path]


def read_document(path: Path) -> Document:
    """Read a TOML file, on top of the files that its ``extends`` names, without the keys that its ``unset``
    names. ``run.name`` is not taken over from them: another experiment is another run.

    Raises:
        ConfigError: a file is missing, unreadable, too large or not TOML, the files extend each other in a circle, or
            there are too many of them.
    """
    return _read(path, (), {})


def _read(path: Path, chain: tuple[Path, ...], known: dict[Path, Document]) -> Document:
    """
    Args:
        chain: files of which each extends the next, and the last one this.
        known: what has been read: each file once, however often it is extended.
    """
    resolved = any(one.name == RESOLVED for one in (*chain, path))  # a stranger may have written it
    layer = with_file_texts(_parse(path), None if resolved else path.parent)
    for key, value in layer.table.items():
        if isinstance(value, (str, list)) and key not in _OF_FILES and (near := nearest(key, _OF_FILES, 0.8)):
            raise _about(layer, f"unknown key; did you mean '{near}'?", key)
    extends = layer.table.pop("extends", [])
    names = [extends] if isinstance(extends, str) else extends
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _about(layer, 'expected a file name or an array of file names, as in extends = "base.toml"')
    chain = (*chain, path)
    result = Document({}, {(): Location(str(path))})
    for name in names:
        result = layered(result, _read_base(path.parent / Path(name).expanduser(), layer, chain, known))
    return layered(_without(result, layer), layer)


def _read_base(base: Path, layer: Document, chain: tuple[Path, ...], known: dict[Path, Document]) -> Document:
    try:
        place, is_there = base.resolve(), base.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, or links in a circle
        raise _about(layer, f"{str(base)!r} is no name of a file ({error})") from None
    if any(place == file.resolve() for file in chain):
        circle = " extends ".join(str(file) for file in (*chain, base))
        raise _about(layer, f"the files extend each other in a circle: {circle}")
    if not is_there:
        raise _about(layer, f"there is no file {base} (names are relative to the file that extends)")
    if place not in known:
        if len(known) + len(chain) >= MAX_FILES:
            raise _about(layer, f"{base} would be one file more than {MAX_FILES}, the most that are read")
        known[place] = _without_run_name(_read(base, chain, known))
    return known[place]


def _without(base: Document, layer: Document) -> Document:
    """``base`` without the keys that ``unset`` of the file on top of it names."""
    keys = layer.table.pop("unset", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _about(layer, 'expected an array of keys, as in unset = ["checkpoint.keep_last"]', "unset")
    result = Document(copy.deepcopy(base.table), dict(base.locations)) if keys else base
    for key in keys:
        try:
            unset(result, key_path(key))
        except InvalidError as error:
            raise _about(layer, str(error), "unset") from None
    return result


def unset(document: Document, path: KeyPath) -> None:
    """Take a key back, in place: it has its default again.

    Raises:
        InvalidError: it is not set.
    """
    holder = table_at(document.table, path[:-1])
    if path[-1] not in holder:
        near = nearest(str(path[-1]), map(str, holder))
        hint = f"; did you mean '{key_text((*path[:-1], near))}'?" if near else ""
        raise InvalidError.because(f"'{key_text(path)}' is not set{hint}")
    del holder[path[-1]]
    forget(document, path)


def table_at(table: Mapping[str, Any], way: Sequence[str | int]) -> dict[str | int, Any]:
    """The table within tables; an empty one if it is not there, or only a component's name stands there."""
    found: Any = table
    for key in way:
        if isinstance(found, list) and isinstance(key, int):
            found = found[key]
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def forget(document: Document, path: KeyPath) -> None:
    """Forget where ``path`` and what is within was written."""
    for known in [known for known in document.locations if known[: len(path)] == path]:
        del document.locations[known]


def key_path(key: str) -> KeyPath:
    """The parts of a key, ``"train.steps"``.

    Raises:
        InvalidError: it is none.
    """
    try:
        parsed: Any = parse_toml(f"{key} = 0")
    except ValueError:
        parsed = {}
    path: KeyPath = ()
    while isinstance(parsed, dict):
        if len(parsed) != 1:  # not TOML, or a line break that would smuggle in a second key
            raise InvalidError.because(f"'{key}' is not a key; keys are words joined by dots")
        ((part, parsed),) = parsed.items()
        path = (*path, part)
    return path


def _without_run_name(base: Document) -> Document:
    result = Document(copy.deepcopy(base.table), dict(base.locations))
    with suppress(InvalidError):  # it has none
        unset(result, ("run", "name"))
    return result


def with_file_texts(document: Document, folder: Path | None) -> Document:
    """With the texts of ``plugins.files`` in place of a list of their names.

    Args:
        folder: where the names begin; ``None`` for a resolved job, which may hold texts only.

    Raises:
        ConfigProblems: a file is missing, unreadable or too large, two have one name, or there may be no names.
    """
    plugins = document.table.get("plugins")
    names = plugins.get("files") if isinstance(plugins, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return document
    if folder is None:
        sentence = f"{RESOLVED} is the name of a resolved job, which holds texts and no names of files; rename it"
        raise ConfigProblems([Problem(_FILES, sentence, location=document.locate(_FILES))])
    texts: dict[str, str] = {}
    for index, name in enumerate(names):
        path = folder / Path(name).expanduser()
        try:
            if path.suffix != ".py" or path.name in texts:
                why = "has the name of another file" if path.name in texts else "must be a Python file, *.py"
                raise ConfigError(f"{path} {why}")
            texts[path.name] = read_plugin_file(path)
        except (OSError, UnicodeDecodeError, ValueError, ConfigError) as error:
            why = f"{path} is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            if isinstance(error, FileNotFoundError):
                why = f"there is no file {path}{_what_was_meant(path)}"
            raise ConfigProblems([Problem((*_FILES, index), why, location=document.locate(_FILES))]) from error
    return Document({**document.table, "plugins": {**plugins, "files": texts}}, document.locations)  # type: ignore[dict-item]  # a table


def read_plugin_file(path: Path) -> str:
    """The text of a plugin in a file, which may be run from here on.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is not UTF-8, or the name is none of a file.
    """
    text = read_regular_file(path, MAX_PLUGIN_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
    trust(text)
    return text


def _about(layer: Document, sentence: str, key: str = "extends") -> ConfigError:
    return ConfigProblems([Problem((key,), sentence, location=layer.locate((key,)))])


def _what_was_meant(path: Path) -> str:
    if str(path).startswith("-"):
        return " (the configuration file comes first, then options and settings)"
    folder = path.parent if path.parent.is_dir() else Path()
    near = nearest(path.name, (one.name for one in folder.glob(f"*{path.suffix or '.toml'}")))
    here = "" if path.is_absolute() else f"; the working directory is {Path.cwd()}"
    return f"; did you mean {folder / near}?" if near else here


def _parse(path: Path) -> Document:
    try:
        text = read_regular_file(path, MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_what_was_meant(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory; name a TOML file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: the file is not UTF-8 text, which TOML has to be") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:  # it has a NUL
        raise ConfigError(f"{str(path)!r} is no name of a file") from None
    try:
        tokens = toml_tokens(text)
        refuse_depth(tokens)
        table = tomllib.loads(text)
    except ValueError as error:  # also a number of too many digits, which is no TOMLDecodeError
        place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        line = int((place and place[1]) or len(text.splitlines()) or 1)
        column = f" (column {place[2]})" if place and place[2] else ""
        sentence = str(error)[: place.start()] if place else str(error)
        raise ConfigError(f"{path}:{line}: not valid TOML: {sentence[:1].lower()}{sentence[1:]}{column}") from None
    locations = {key: Location(str(path), line) for key, line in key_lines(tokens).items()}
    return Document(table, {(): Location(str(path)), **locations})


def layered(base: Document, layer: Document) -> Document:
    """``layer`` on top of ``base``: tables are merged, everything else is replaced.

    A table that chooses another component than the one below it replaces it as a whole, so that no key of the other
    component is left over.
    """
    replaced: set[KeyPath] = set()
    table = _merged(base.table, layer.table, (), replaced)
    kept = {
        path: location
        for path, location in base.locations.items()
        if not any(path[:length] in replaced for length in range(1, len(path) + 1))
    }
    return Document(table, kept | layer.locations)


def _merged(base: Mapping[str, Any], layer: Mapping[str, Any], path: KeyPath, replaced: set[KeyPath]) -> dict[str, Any]:
    result = dict(base)
    for key, new in layer.items():
        here = (*path, key)
        old = result.get(key)
        if here != ("run",) and key != "name":
            old, new = as_choice(old, new), as_choice(new, old)
        if isinstance(old, dict) and isinstance(new, dict) and not chooses_another(old, new, here):
            result[key] = _merged(old, new, here, replaced)
        else:
            result[key] = new
            replaced.add(here)
    return result


def as_choice(value: Any, beside: Any) -> Any:
    """``optimizer = "adamw"`` means ``optimizer = {name = "adamw"}`` when the other layer has a table there."""
    return {"name": value} if isinstance(value, str) and isinstance(beside, dict) else value


def chooses_another(old: Mapping[str, Any], new: Mapping[str, Any], path: KeyPath) -> bool:
    """Return whether two tables of one key name different components. A run is called by a name, it is not chosen by
    one."""
    one, other = old.get("name"), new.get("name")
    if path == ("run",) or not isinstance(one, str) or not isinstance(other, str):
        return False
    if ":" in one and ":" in other:
        return one != other
    return one.rpartition(":")[2] != other.rpartition(":")[2]
