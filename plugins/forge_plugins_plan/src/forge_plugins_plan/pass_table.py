"""The table of passes: what each has touched, in few words."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from forge_core.contracts.observer import Observer, PassTrace

WIDTH = 120
"""Characters of a line; names that do not fit go on below."""

Name = tuple[str, ...]
"""The components of a qualified name."""


class PassTable(Observer):
    """Prints the table in a dry run."""

    def __init__(self, **_: object) -> None:
        pass

    def dry_run(self, say: Callable[[str], None], passes: Sequence[PassTrace]) -> None:
        for line in pass_table(passes):
            say(line)


def pass_table(rows: Sequence[PassTrace]) -> list[str]:
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
    for index in range(max(map(len, parts), default=0)):
        parts = _folded_at(index, parts)
    return ", ".join(".".join(name) for name in parts)


def _folded_at(index: int, names: Sequence[Name]) -> list[Name]:
    """Names that are equal but for a number at ``index`` become the first of them, with all of their numbers."""
    numbers: dict[tuple[Name, Name], list[int]] = {}
    for name in names:
        if _has_number(name, index):
            numbers.setdefault((name[:index], name[index + 1 :]), []).append(int(name[index]))
    done: list[Name] = []
    for name in names:
        if not _has_number(name, index):
            done.append(name)
        elif found := numbers.pop((name[:index], name[index + 1 :]), None):
            done.append((*name[:index], _ranges(found), *name[index + 1 :]))
    return done


def _has_number(name: Name, index: int) -> bool:
    return index < len(name) and name[index].isdecimal()


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 7]`` to ``0–2,7``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("–".join(map(str, one)) for one in ranges)
