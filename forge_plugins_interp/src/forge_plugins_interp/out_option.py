"""The option ``--out`` of commands: looked at before the work, written after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.errors import ConfigError
from forge_plugins_interp.figures.blank import refuse_without_matplotlib
from forge_plugins_interp.tidy_table import Row, write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
