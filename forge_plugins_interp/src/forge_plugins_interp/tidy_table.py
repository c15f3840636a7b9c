"""Results as tidy tables: a row an observation, a column a variable."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError

Row = Mapping[str, Any]


def refuse_other_ending(out: Path | None, endings: Sequence[str] = (".csv", ".png")) -> None:
    """
    Raises:
        ConfigError: ``--out`` ends otherwise.
    """
    if out is not None and out.suffix not in endings:
        raise ConfigError(f"--out {out}: must end with {' or '.join(endings)}")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows that have the same columns. A value that is not known is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
