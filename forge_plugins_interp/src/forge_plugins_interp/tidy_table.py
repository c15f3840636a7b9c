"""Results as tidy tables: a row an observation, a column a variable."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import ConfigError
from forge_plugins_interp.figures.blank import refuse_without_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


def refuse_other_ending(out: Path | None) -> None:
    """Look at ``--out`` before the work begins.

    Raises:
        ConfigError: it ends neither with .csv nor with .png, or a picture cannot be drawn here.
    """
    if out is None:
        return
    if out.suffix not in (".csv", ".png"):
        raise ConfigError(f"--out {out}: must end with .csv or .png")
    if out.suffix == ".png":
        refuse_without_matplotlib()


def save_results(out: Path | None, rows: Sequence[Row], draw: Callable[[], Figure], *, as_json: bool = False) -> None:
    """Write ``--out``, if it is given: the rows as .csv; or the picture as .png, with the rows as .csv beside it.

    Args:
        as_json: whether stdout has JSON, so that what was written is told on stderr.
    """
    if out is None:
        return
    write_csv(out.with_suffix(".csv"), rows)
    if out.suffix == ".png":
        draw().savefig(out, dpi=150)
    print(f"wrote {out}", file=sys.stderr if as_json else sys.stdout)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows that have the same columns. A value that is not known is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
