"""Tables for the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from textwrap import fill, wrap

LEAST_ROOM = 20
"""Characters below which text is not wrapped."""


def aligned(rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """Rows as lines, columns two spaces apart; the column ``right`` is flush right. On a terminal, the last column
    wraps at its width; where that leaves no room for it, there are no columns, and rows wrap as sentences do."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    before_last = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = (width := terminal_width()) - before_last
    if width and room < min(widths[-1], LEAST_ROOM):
        sentences = ("  ".join(filter(None, map(str.strip, row))) for row in rows)
        return [fill(row, width, subsequent_indent="    ", break_on_hyphens=False) for row in sentences]
    if width:
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


def wrapped(text: str) -> str:
    """A line as it is; on a terminal that is narrower, as lines, those below further in."""
    width, begun = terminal_width(), " " * (len(text) - len(text.lstrip()))
    below = f"{begun}    "
    return fill(text, width, subsequent_indent=below, break_on_hyphens=False) if width >= LEAST_ROOM else text


def terminal_width() -> int:
    """0 where there is none: lines are then as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
