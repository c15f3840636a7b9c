"""The last values of a study's runs, as a table."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from forge_core.commands.table import aligned
from forge_plugins_studies.study import Study

_COLUMNS = ("loss", "eval/loss")
_SEED = "train.seed"
_TRIED = 4
"""The newest lines that have a name: one of them may be damaged. To parse all lines of a run takes seconds."""


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
    """Print a row per run: its settings, how it ended, and its last losses in nats per token, the lowest marked. Where
    seeds are swept, the means over them follow.

    Args:
        states: of the runs that were started, by name.
    """
    rows = [last_values(run) for run in study.runs]
    shown = [name for name in _COLUMNS if any(name in row for row in rows)]
    finite = {name: [row[name] for row in rows if row.get(name) is not None] for name in shown}
    keys = [override.partition("=")[0] for override in study.points[0].overrides]
    table = [(*keys, "state", "step", *shown)]
    typed = [[override.partition("=")[2] for override in point.overrides] for point in study.points]
    for run, settings, row in zip(study.runs, typed, rows, strict=True):
        losses = [_loss(row[name], finite[name]) if name in row else "-" for name in shown]
        table.append((*settings, states.get(run.name, "not started"), str(row.get("step", "-")), *losses))
    print("\n".join(aligned(flush_right(table, len(keys) + 1))))
    if _SEED in keys and shown:
        losses_of = [[row.get(name) for name in shown] for row in rows]
        settings_of = [dict(zip(keys, settings, strict=True)) for settings in typed]
        print("\n".join(_over_seeds(settings_of, losses_of, shown)))


def _over_seeds(
    settings: Sequence[Mapping[str, str]], losses: Sequence[Sequence[float | None]], names: Sequence[str]
) -> list[str]:
    """A row for each combination of the other settings, with mean and sample standard deviation of each loss."""
    groups: dict[tuple[str, ...], list[Sequence[float | None]]] = {}
    for of_run, values in zip(settings, losses, strict=True):
        groups.setdefault(tuple(value for key, value in of_run.items() if key != _SEED), []).append(values)
    table = [(*(key for key in settings[0] if key != _SEED), "seeds", *names)]
    for others, of_group in groups.items():
        of_each = [_mean_and_spread(column) for column in zip(*of_group, strict=True)]
        table.append((*others, str(len(of_group)), *of_each))
    return [f"mean ± standard deviation over {_SEED}:", *aligned(flush_right(table, len(table[0]) - len(names) - 1))]


def _mean_and_spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"none in {len(values) - len(known)} of {len(values)}"
    spread = f" ± {statistics.stdev(known):.4f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.4f}{spread}"


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
    newest = {b'"%s"' % name.encode(): deque[tuple[int, bytes]](maxlen=_TRIED) for name in ("step", *_COLUMNS)}
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            for number, line in enumerate(file):
                for name, lines in newest.items():
                    if name in line:
                        lines.append((number, line))
    except OSError:
        return found
    for _, line in sorted({*chain.from_iterable(newest.values())}):
        try:
            values = json.loads(line)
        except ValueError:  # it was being written when the machine failed
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found["step"] = values["step"]
            found |= {name: _finite(values[name]) for name in _COLUMNS if name in values}
    return found


def last_event(run: Path) -> tuple[str, int] | None:
    """The newest event of a run and its step, if there is one that can be read."""
    try:
        with (run / "events.jsonl").open("rb") as file:
            (line,) = deque(file, maxlen=1)
        event = json.loads(line)
        return str(event["event"]), int(event["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
