"""Results as tidy tables: a row an observation, a column a variable."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import ConfigError
from forge_plugins_interp.figures.blank import refuse_without_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


def look_at_out(out: Path | None, read: Path | None = None) -> None:
    """Look at ``--out`` before the work begins.

    Args:
        read: a file that the command reads.

    Raises:
        ConfigError: it ends neither with .csv nor with .png, its folder is not there, it would be written over what is
            read, or a picture cannot be drawn here.
    """
    if out is None:
        return
    if out.suffix not in (".csv", ".png"):
        raise ConfigError(f"--out {out}: must end with .csv or .png")
    refuse_no_folder(out)
    table = out.with_suffix(".csv")
    if read is not None and read.exists() and table.exists() and table.samefile(read):
        raise ConfigError(f"--out {out}: {table} would be written over {read}; give another name")
    if out.suffix == ".png":
        refuse_without_matplotlib()


def refuse_no_folder(out: Path) -> None:
    """
    Raises:
        ConfigError: the folder that ``--out`` is to be in is not there.
    """
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} is not there")


def save_results(out: Path | None, rows: Sequence[Row], draw: Callable[[], Figure], *, as_json: bool = False) -> None:
    """Write ``--out``, if it is given: the rows as .csv; or the picture as .png, with the rows as .csv beside it.

    Args:
        as_json: whether stdout has JSON, so that what was written is told on stderr.

    Raises:
        ConfigError: it cannot be written.
    """
    if out is None:
        return
    with writing(out):
        write_csv(out.with_suffix(".csv"), rows)
        if out.suffix == ".png":
            draw().savefig(out, dpi=150)
    print(f"wrote {out}", file=sys.stderr if as_json else sys.stdout)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Say in a sentence why ``--out`` cannot be written.

    Raises:
        ConfigError: it cannot.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out: cannot write {error.filename or out}: {error.strerror}") from error


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
