"""The section of configurations: how the jobs of runs differ, and each as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import tomli_w

from forge_core.config.describe import literal, without_passwords
from forge_core.config.diff import leaves
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import ABSENT, comparison, folded


class Configurations(ReportSection):
    """The keys that not all runs have with one value, and the job of each run."""

    title = "Configurations"
    place = 50.0

    def render(self, runs: Sequence[RunRecord]) -> str:
        known = [run for run in runs if run.job]
        rows = {key: row for key, row in flattened([run.job for run in known]).items() if len(set(row)) > 1}
        same = '<p class="note">The runs have the same job.</p>' if len(known) > 1 and not rows else ""
        whole = "".join(folded(f"job.toml of {run.label}", _text(run.job)) for run in known)
        return same + comparison(known, rows) + whole


def flattened(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """For each key that any table has, such as ``callbacks[0].interval``, its values in the words of TOML, without
    passwords."""
    flat = [{key: without_passwords(_words(value)) for key, value in leaves(table)} for table in tables]
    keys = dict.fromkeys(key for table in flat for key in table)
    return {key: [table.get(key, ABSENT) for table in flat] for key in keys}


def _words(value: Any) -> str:
    return ABSENT if value is None else literal(value)


def _text(job: Mapping[str, Any]) -> str:
    return f"<pre>{escape(without_passwords(tomli_w.dumps(job)))}</pre>"
