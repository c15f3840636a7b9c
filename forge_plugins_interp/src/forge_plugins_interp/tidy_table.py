"""Results as tidy tables: a row an observation, a column a variable."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table with a header.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
        csv.Error: it is damaged, or a row has more fields than the header.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines, rows = csv.DictReader(file), []
        for row in lines:
            if None in row:
                raise csv.Error(
                    f'line {lines.line_num} has more fields than the header; quote texts with commas: "a, b"'
                )
            rows.append(row)
        return rows


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows that have the same columns. A value that is not known is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
