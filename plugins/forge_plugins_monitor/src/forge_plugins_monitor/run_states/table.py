"""The table of ``forge runs``: a line a run, or, where the terminal is narrower than that, a few."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from textwrap import wrap

import click

from forge_core.commands.table import LEAST_ROOM, aligned, terminal_width

_COLOURS = {"running": "green", "failed": "red", "queued": "yellow"}
_RIGHT = ("STEP", "LOSS", "BEST", "SAVED", "LAST SEEN")
_NARROW = ("RUN", "STATE", "STEP")
"""What stands in columns on a narrow terminal, too; the rest is in lines below."""


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Args: rows are cells by title. Columns that are empty in all rows are left out."""
    width = terminal_width()
    titles = [
        title for title in dict.fromkeys(key for row in rows for key in row) if any(row.get(title) for row in rows)
    ]
    widths = {title: max(len(title), *(len(row.get(title, "-")) for row in rows)) for title in titles}
    *before, last = titles
    needed = sum(widths[title] + 2 for title in before) + min(widths[last], LEAST_ROOM)
    if not width or needed <= width:
        shown = [{title: row.get(title) or "-" for title in titles} for row in rows]
    else:
        room = max(LEAST_ROOM // 2, width - 4 - widths["STATE"] - widths["STEP"])
        widths["RUN"] = min(widths["RUN"], room)
        titles = [*_NARROW]
        shown = [{**row, "RUN": row["RUN"][:room]} for row in rows]
    cells = [
        [row[title].rjust(widths[title]) if title in _RIGHT else row[title].ljust(widths[title]) for title in titles]
        for row in ({title: title for title in titles}, *shown)
    ]
    header, *lines = aligned(cells)
    click.echo(header)
    for row, line in zip(rows, lines, strict=True):
        click.echo(_coloured(line, widths["RUN"] + 2, row["STATE"]))
        for below in _below(row, widths["RUN"], width) if titles == [*_NARROW] else ():
            click.echo(f"  {below}")


def _below(row: Mapping[str, str], room: int, width: int) -> list[str]:
    """What did not find a place in the line of a run."""
    words = {"LOSS": "loss", "BEST": "best", "SAVED": "saved", "LAST SEEN": "", "DIFFERS IN": ""}
    facts = [
        f"{words.get(key, key.lower())} {cell}".strip() for key, cell in row.items() if cell and key not in _NARROW
    ]
    return wrap("  ".join(filter(None, (row["RUN"][room:], *facts))), max(1, width - 2), break_on_hyphens=False)


def _coloured(line: str, at: int, state: str) -> str:
    if os.environ.get("NO_COLOR") or state not in _COLOURS:  # in a pipe, click takes colours out
        return line
    return f"{line[:at]}{click.style(state, fg=_COLOURS[state])}{line[at + len(state) :]}"
