"""Patterns of parameter names in a list of tables, of which the first match wins."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Protocol


class HasPattern(Protocol):
    """A table of a configuration."""

    @property
    def pattern(self) -> str:
        """``*`` stands for anything, dots included."""
        ...


def first_match(name: str, tables: Sequence[HasPattern]) -> int | None:
    """The index of the table that takes the parameter of this name."""
    return next((i for i, table in enumerate(tables) if fnmatch.fnmatchcase(name, table.pattern)), None)


def why_idle(at: str, pattern: str, names: Sequence[str], before: str) -> str:
    """Why a table takes no parameter.

    Args:
        at: the key of the list.
        names: of all parameters.
        before: what takes all that it matches, if it matches any: ``"groups"``.
    """
    if matches := fnmatch.filter(names, pattern):
        return (
            f"{at}: the pattern {pattern!r} takes no parameter, because {before} before it take all that it matches, "
            f"such as {matches[0]!r}. The first match wins: put the narrower pattern first."
        )
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return (
        f"{at}: the pattern {pattern!r} matches no parameter. The nearest names are {', '.join(nearest)}. "
        "('*' stands for anything, dots included.)"
    )
