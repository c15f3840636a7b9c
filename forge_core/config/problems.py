"""Problems of a configuration: every problem with its place, and all of them in one error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from forge_core.errors import ConfigError

MAX_SHOWN = 20
"""Problems that are told in full; of more, their number."""

_SHOWN_OF_OVERRIDE = 200
"""Characters."""

KeyPath = tuple[str | int, ...]
"""``("callbacks", 0, "name")``: the way from the root of a configuration to a value."""


@attrs.frozen
class Location:
    """Where a value was written."""

    source: str
    """A file as the user named it, or the text of an override."""
    line: int | None = None
    """Counts from 1; ``None`` for a whole file and for an override."""
    is_override: bool = False

    def __str__(self) -> str:
        if self.is_override:
            return self.source if len(self.source) <= _SHOWN_OF_OVERRIDE else f"{self.source[:_SHOWN_OF_OVERRIDE]}…"
        return self.source if self.line is None else f"{self.source}:{self.line}"


@attrs.frozen
class Problem:
    """One thing to mend."""

    path: KeyPath
    """The key that the sentence is about; empty for the whole configuration."""
    sentence: str
    """Lower case, no full stop needed: ``expected an integer, got the string "12"``."""
    at: KeyPath | None = None
    """The key on whose line the mistake stands, if it is not ``path`` itself (the ``name`` of a component's table)."""
    location: Location | None = None
    allowed: Mapping[str, Any] | None = None
    """Valid values or names, in keywords of JSON Schema; ``None`` where only words can."""

    def under(self, key: str | int) -> Problem:
        """The same problem, seen from one table further out."""
        return self.moved(lambda path: (key, *path))

    def moved(self, way: Callable[[KeyPath], KeyPath]) -> Problem:
        """The same problem, about the keys to which ``way`` leads."""
        return attrs.evolve(self, path=way(self.path), at=None if self.at is None else way(self.at))

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.location, key_text(self.path), self.sentence) if part)


class InvalidError(Exception):
    """Raised inside the converter, where it is not known yet where the values were written."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)

    @classmethod
    def because(cls, sentence: str, **allowed: Any) -> InvalidError:
        """About the very value that is being converted.

        Args:
            **allowed: ``Problem.allowed``.
        """
        return cls([Problem((), sentence, allowed=allowed or None)])


class ConfigProblems(ConfigError):  # noqa: N818  # it is a list of problems, and reads as one
    """Everything that is wrong with one configuration, in the order of its lines."""

    def __init__(self, problems: Iterable[Problem], subject: str = "the configuration") -> None:
        self.problems = tuple(sorted(problems, key=_reading_order))
        lines = [str(problem) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > 1:
            further = f"; the first {MAX_SHOWN} are shown" if len(self.problems) > MAX_SHOWN else ""
            lines.append(f"{len(self.problems)} problems in {subject}{further}")
        super().__init__("\n".join(lines))


def _reading_order(problem: Problem) -> tuple[bool, str, int]:
    """Files first, by line; then what the command line says. Problems of one line keep the order they were found in."""
    location = problem.location or Location("")
    return location.is_override, "" if location.is_override else location.source, location.line or 0


def key_text(path: KeyPath) -> str:
    """``("callbacks", 0, "name")`` as ``callbacks[0].name``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def key_path(text: str) -> KeyPath:
    """``"groups[1].lr"`` as ``("groups", 1, "lr")``."""
    return tuple(int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", text))
