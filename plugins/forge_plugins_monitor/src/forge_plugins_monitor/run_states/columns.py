"""The columns of ``forge runs`` that are installed, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ForgeError
from forge_core.registry.catalog import Catalog
from forge_plugins_monitor.run_states.column import RunColumn

Cells = Mapping[Path, Mapping[str, Any]]


def columns_of(catalog: Catalog) -> list[RunColumn]:
    """All that can be built; a line on the error stream says which cannot."""
    build = ComponentBuilder(catalog)
    found: list[RunColumn] = []
    for entry in catalog.components("run_column"):
        try:
            found.append(build(build.resolve("run_column", entry.qualified_name)))
        except ForgeError as error:
            click.echo(f"note: the column '{entry.qualified_name}' cannot be made: {error}", err=True)
    return found


def cells_of(columns: Sequence[RunColumn], runs: Sequence[Path]) -> dict[str, Cells]:
    """What they say, by title; of one that cannot say, the reason goes to the error stream."""
    cells: dict[str, Cells] = {}
    for column in columns:
        try:
            cells[column.title] = column.cells(runs)
        except Exception as error:  # noqa: BLE001  # a plugin's mistake must not hide the runs
            said = str(error) if isinstance(error, ForgeError) else f"{column.title}: {type(error).__name__}: {error}"
            click.echo(f"note: {said}", err=True)
    return cells


def states(columns: Sequence[RunColumn], runs: Sequence[Path]) -> dict[Path, str]:
    """Where a column knows better than a run's files whether it is queued or running."""
    found: dict[Path, str] = {}
    for cells in cells_of(columns, runs).values():
        found |= {run: str(cell["state"]) for run, cell in cells.items() if cell.get("state")}
    return found
