"""What each pass did to the model, as a table: for ``forge run --dry-run``."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import attrs
from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Characters of a line; names that do not fit go on below."""

Name = tuple[str, ...]
"""The components of a qualified name."""


@attrs.frozen
class PassRow:
    """One pass, on all ranks along ``pp``."""

    name: str
    phase: str
    touched: Sequence[Sequence[str]]
    """Qualified names of modules, by rank; the empty one is the model itself."""


def pass_table(rows: Sequence[PassRow]) -> list[str]:
    """The lines of the table, in the order given; pipelines have a line for each of their ranks."""
    piped = any(len(row.touched) > 1 for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("pass", "phase", *(["rank of pp"] if piped else [])):
        table.add_column(column, no_wrap=True)
    table.add_column("modules", justify="right", no_wrap=True)
    table.add_column("touched", overflow="fold")
    for row in rows:
        for rank, names in enumerate(row.touched):
            first = (row.name, row.phase) if rank == 0 else ("", "")
            table.add_row(*first, *([str(rank)] if piped else []), str(len(names)), folded(names) or "nothing")
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def folded(names: Iterable[str]) -> str:
    """Names that differ in a number only become one: ``blocks.0–11.up``. The empty name is "the model".

    >>> folded(["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.7"])
    'embed, blocks.0–2,7'
    """
    parts = [tuple(name.split(".")) if name else ("the model",) for name in names]
    for place in range(max(map(len, parts), default=0)):
        parts = _folded_at(place, parts)
    return ", ".join(".".join(name) for name in parts)


def _folded_at(place: int, names: Sequence[Name]) -> list[Name]:
    """Names that are equal but for a number at ``place`` become the first of them, with all of their numbers."""
    numbers: dict[tuple[Name, Name], list[int]] = {}
    for name in names:
        if _has_number(name, place):
            numbers.setdefault((name[:place], name[place + 1 :]), []).append(int(name[place]))
    done: list[Name] = []
    for name in names:
        if not _has_number(name, place):
            done.append(name)
        elif found := numbers.pop((name[:place], name[place + 1 :]), None):
            done.append((*name[:place], _ranges(found), *name[place + 1 :]))
    return done


def _has_number(name: Name, place: int) -> bool:
    return place < len(name) and name[place].isdecimal()


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 7]`` to ``0–2,7``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("–".join(map(str, one)) for one in ranges)
