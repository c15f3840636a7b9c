"""Tables for the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap

LEAST_ROOM = 20
"""Characters below which text is not wrapped."""


def aligned(rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """Rows as lines, columns two spaces apart; the column ``right`` is flush right. On a terminal, the last column
    wraps at its width, where that leaves some room."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    before_last = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = terminal_width() - before_last
    if room >= LEAST_ROOM:
        under = f"\n{' ' * before_last}"
        rows = [(*row[:-1], under.join(wrap(row[-1], room, break_on_hyphens=False))) for row in rows]
        widths[-1] = 0
    return [
        "  ".join(
            cell.rjust(width) if index == right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def terminal_width() -> int:
    """0 where there is none: lines are then as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
