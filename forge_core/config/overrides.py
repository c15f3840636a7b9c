"""Settings from the command line: ``--train.steps=20``, ``train.steps=20`` and ``--train.steps 20`` mean the same;
``~train.steps`` takes one back."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import attrs

from forge_core.config.describe import describe
from forge_core.config.problems import ConfigProblems, InvalidError, KeyPath, Location, Problem, key_text
from forge_core.config.toml_file import Document, chooses_another, forget, key_path, unset
from forge_core.config.toml_text import parse_toml
from forge_core.errors import nearest

_NOTHING = object()
"""The value of what is taken back."""
_NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")


@attrs.frozen
class Override:
    """One setting of the command line."""

    text: str
    """The override as it was typed; an error about it shows this."""
    path: KeyPath
    value: Any

    @property
    def depth(self) -> int:
        """How many tables are around what this sets; a component's ``name`` stands for the table that it is in, and a
        key is taken back before it is set."""
        return len(self.path) - (self.path[-1] == "name" or self.value is _NOTHING)


def with_overrides(
    document: Document, tokens: Sequence[str], *, sections: Collection[str], options: Collection[str] = ()
) -> Document:
    """The document as the command line changes it.

    What holds other settings is set before what it holds (a component's name before its keys), otherwise in the given
    order, so that none is lost.

    Args:
        tokens: what the command line says beyond the options that the command knows.
        sections: the keys that may stand without a dot.
        options: the command's own options, such as ``--world-size``: one of them may be misspelt.

    Raises:
        ConfigProblems: a token is no setting, has no value, or leads to a place that does not exist.
    """
    overrides, problems = _parse(tokens, sections, options)
    edited = Document(copy.deepcopy(document.table), dict(document.locations))
    for override in sorted(overrides, key=lambda override: override.depth):
        location = Location(override.text, is_override=True)
        try:
            if override.value is _NOTHING:
                unset(edited, override.path)
            else:
                _set(edited, override, location)
        except InvalidError as error:
            problems += [attrs.evolve(problem, location=location) for problem in error.problems]
    if problems:
        raise ConfigProblems(problems, "the command line")
    return edited


def _parse(
    tokens: Sequence[str], sections: Collection[str], options: Collection[str]
) -> tuple[list[Override], list[Problem]]:
    overrides, problems = [], []
    for words in settings_in(tokens, sections):
        text = " ".join(words)
        key, equals, raw = words[0].removeprefix("--").partition("=")
        try:
            if text.startswith("~"):
                overrides.append(Override(text, key_path(text[1:]), _NOTHING))
                continue
            _require_setting(text, key, sections, options)
            if len(words) == 2:
                raw = words[1]
            elif not equals:
                raise InvalidError.because(f"needs a value, as in {text}=…")
            overrides.append(Override(text, key_path(key), _value(raw)))
        except InvalidError as error:
            location = Location(text, is_override=True)
            problems += [attrs.evolve(problem, location=location) for problem in error.problems]
    return overrides, problems


def settings_in(tokens: Sequence[str], sections: Collection[str]) -> Iterator[list[str]]:
    """The tokens of one setting after the other: one or two of each."""
    remaining = list(tokens)
    while remaining:
        words = [remaining.pop(0)]
        takes_next = words[0].startswith("--") and "=" not in words[0]
        if takes_next and remaining and not _starts_another(remaining[0], sections):
            words.append(remaining.pop(0))
        yield words


def _require_setting(text: str, key: str, sections: Collection[str], options: Collection[str]) -> None:
    is_option = text.startswith("--")
    if not is_option and (key.startswith("-") or "=" not in text):
        raise InvalidError.because("is not a setting; a setting is written section.key=value")
    if "." in key or key in sections:
        return
    near = nearest(f"--{key}", [*options, *(f"--{section}" for section in sections)])
    if near is None:
        remedy = "a setting is written section.key=value"
    else:
        remedy = f"did you mean '{near if is_option or near in options else near.removeprefix('--')}'?"
    kind = "is neither an option nor a section" if is_option else "is not a section"
    raise InvalidError.because(f"{kind}; {remedy}", enum=[*sections])


def _starts_another(token: str, sections: Collection[str]) -> bool:
    """Return whether a token is an option or a setting of its own, and not the value of the one before."""
    if token.startswith("-"):
        return not _NEGATIVE_NUMBER.match(token)
    key, equals, _ = token.partition("=")
    return bool(equals) and key.partition(".")[0] in sections


def _value(raw: str) -> Any:
    """A TOML value; what is none is a string, so that words need no quotes.

    It is parsed inside an inline table, which can hold neither a comment nor a second line that would cut it short.
    """
    try:
        parsed = parse_toml(f"v = {{ v = {raw} }}")
    except ValueError as error:
        if raw.lstrip().startswith(("[", "{", '"', "'")):
            raise InvalidError.because(f"the value is not valid TOML ({error}); a text is quoted: '{raw}'") from None
        return raw
    return parsed["v"]["v"] if len(parsed) == 1 and parsed["v"].keys() == {"v"} else raw


def _set(document: Document, override: Override, location: Location) -> None:
    holder: Any = document.table
    path: KeyPath = ()
    for part in override.path[:-1]:
        key = _key_in(holder, part, path)
        path = (*path, key)
        if isinstance(holder, dict) and key not in holder:
            holder[key] = {}
            document.locations[path] = location
        elif isinstance(holder[key], str) and key != "name":
            holder[key] = {"name": holder[key]}  # `optimizer = "adamw"` has room for the component's keys
        elif holder[key] is True:
            holder[key] = {}  # so has a pass that is switched on
        holder = holder[key]
    key = _key_in(holder, override.path[-1], path)
    if isinstance(override.value, str) and _is_choice(holder.get(key) if isinstance(holder, dict) else None, path, key):
        holder, path, key = holder[key], (*path, key), "name"
    if key == "name" and chooses_another(holder, {"name": override.value}, path):
        for other in [*holder]:
            del holder[other]
            forget(document, (*path, other))
        document.locations[path] = location
    forget(document, (*path, key))
    holder[key] = override.value
    document.locations[*path, key] = location


def _is_choice(value: Any, path: KeyPath, key: str | int) -> bool:
    """Return whether ``value`` is a component's table, so that a string in its place stands for its ``name``."""
    return isinstance(value, dict) and isinstance(value.get("name"), str) and (*path, key) != ("run",)


def _key_in(holder: Any, part: str | int, path: KeyPath) -> str | int:
    """``part`` as a key of a table, or as an index of an array."""
    if isinstance(holder, dict):
        return part
    where = key_text(path)
    if isinstance(holder, list):
        if str(part).isdecimal() and int(part) < len(holder):
            return int(part)
        raise InvalidError.because(f"{where} has {len(holder)} entries; '{part}' is not one of them")
    raise InvalidError.because(f"{where} is {describe(holder)}, not a table")
