"""Tables of runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from forge_plugins_monitor.report.run_record import RunRecord

ABSENT = "–"


def comparison(runs: Sequence[RunRecord], rows: Mapping[str, Sequence[str]]) -> str:
    """A row for each thing, a column for each run; all texts are plain. Empty if there is no row."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{run_name(run)}</th>' for run in runs)
    body = "".join(f'<tr><th scope="row">{escape(name)}</th>{_cells(values)}</tr>' for name, values in rows.items())
    return _wide(f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody>")


def listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a head; all texts are plain. Empty if there is no row."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return _wide(f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")


def folded(summary: str, html: str) -> str:
    """``html`` behind a line that opens it; empty if it is."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>" if html else ""


def run_name(run: RunRecord) -> str:
    """The label of a run as HTML, with its colour."""
    return f'<span class="swatch" data-run="{run.index}"></span>{escape(run.label)}'


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _wide(inner: str) -> str:
    return f'<div class="wide"><table>{inner}</table></div>'
