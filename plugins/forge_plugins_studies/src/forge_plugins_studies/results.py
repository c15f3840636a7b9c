"""The last values of a study's runs, as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.commands.table import aligned
from forge_plugins_studies.study import Study

_COLUMNS = ("loss", "eval/loss")


@attrs.frozen(kw_only=True)
class SweptRun:
    """A run of a study, and its last losses in nats per token."""

    name: str
    path: Path
    settings: Mapping[str, str]
    """The values of the keys that are swept, as typed."""
    state: str
    """How it ended, or ``not started``."""
    step: int | None
    """Of the newest line of its metrics; null, as the losses, without one."""
    loss: float | None
    eval_loss: float | None


def swept_runs(study: Study, states: Mapping[str, str]) -> list[SweptRun]:
    """The runs for programs.

    Args:
        states: of the runs that were started, by name.
    """
    runs = []
    for run, point in zip(study.runs, study.points, strict=True):
        row, settings = last_values(run), (override.partition("=") for override in point.overrides)
        one = SweptRun(
            name=run.name,
            path=run,
            settings={key: value for key, _, value in settings},
            state=states.get(run.name, "not started"),
            step=row.get("step"),
            loss=row.get("loss"),
            eval_loss=row.get("eval/loss"),
        )
        runs.append(one)
    return runs


def print_results(study: Study, states: Mapping[str, str]) -> None:
    """Print a row a run: its settings, how it ended, and its last losses in nats a token, the lowest marked.

    Args:
        states: of the runs that were started, by name.
    """
    rows = [last_values(run) for run in study.runs]
    shown = [name for name in _COLUMNS if any(name in row for row in rows)]
    finite = {name: [row[name] for row in rows if row.get(name) is not None] for name in shown}
    keys = [override.partition("=")[0] for override in study.points[0].overrides]
    table = [(*keys, "state", "step", *shown)]
    for run, point, row in zip(study.runs, study.points, rows, strict=True):
        settings = [override.partition("=")[2] for override in point.overrides]
        losses = [_loss(row[name], finite[name]) if name in row else "-" for name in shown]
        table.append((*settings, states.get(run.name, "not started"), str(row.get("step", "-")), *losses))
    print("\n".join(aligned(flush_right(table, len(keys) + 1))))


def flush_right(rows: Sequence[Sequence[str]], first: int) -> list[tuple[str, ...]]:
    """The same rows, with the cells of the column ``first`` and of those behind it as wide as the column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        tuple(
            cell.rjust(width) if index >= first else cell
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _loss(value: float | None, all_of_them: Sequence[float]) -> str:
    if value is None:
        return "not finite"
    return f"* {value:.4f}" if value == min(all_of_them) else f"{value:.4f}"


def last_values(run: Path) -> dict[str, Any]:
    """The step of the newest line of ``metrics.jsonl``, and the newest value of each loss; ``None`` if not finite."""
    found: dict[str, Any] = {}
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return found
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:  # it was being written when the machine failed
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found["step"] = values["step"]
            found |= {name: _finite(values[name]) for name in _COLUMNS if name in values}
    return found


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
