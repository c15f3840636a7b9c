"""The section that sums up each run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from forge_core.config.describe import without_passwords
from forge_plugins_monitor.report.differences import flattened
from forge_plugins_monitor.report.run_record import RunRecord, attempts
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import ABSENT, comparison, folded

_ENDS = ("completed", "stopped", "preempted", "failed")


class Summary(ReportSection):
    """State, steps, tokens, losses, times and machines of the runs beside each other."""

    title = "Summary"
    place = 10.0

    def render(self, runs: Sequence[RunRecord]) -> str:
        columns = [_facts(run) for run in runs]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = {name: [column.get(name, ABSENT) for column in columns] for name in names}
        environments = flattened([run.environment for run in runs])
        return comparison(runs, rows) + folded("environment.json", comparison(runs, environments))


def _facts(run: RunRecord) -> dict[str, str]:
    """The known ones, by name."""
    facts = {
        "state": _state(run.events),
        "step": _steps(run),
        "tokens": _number(run.curve("tokens").last, ",.0f"),
        "last loss": _number(run.curve("loss").last, ".4f"),
        **_evaluations(run),
        "time": _duration(sum(map(_seconds, attempts(run.events)))),
        "throughput, median": _throughput(run),
        "model": _component(run.job, "model"),
        "optimizer": _component(run.job, "optimizer"),
        "ran on": _machine(run.environment),
        "directory": str(run.path),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _state(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "not started"
    told = [event for event in events if event["event"] in (*_ENDS, "started", "resumed")]
    if not told or told[-1]["event"] not in _ENDS:
        return "running, or killed"
    ended = told[-1]
    state = str(ended["event"])
    why = ended.get("error") or ended.get("reason")
    return without_passwords(f"{state}: {why}") if why else state


def _steps(run: RunRecord) -> str:
    train = run.job.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return f"{run.last_step:,} of {steps:,}" if isinstance(steps, int) else f"{run.last_step:,}"


def _evaluations(run: RunRecord) -> dict[str, str]:
    """The last value of each loss of an evaluation, and its lowest."""
    facts = {}
    for name in (name for name in run.metrics() if name.startswith("eval/") and name.endswith("loss")):
        curve = run.curve(name)
        if finite := [value for value in curve.values if value is not None]:
            facts[name] = f"{_number(curve.last, '.4f')} (lowest {min(finite):.4f})"
    return facts


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _throughput(run: RunRecord) -> str:
    speeds = [value for value in run.curve("tokens_per_second").values if value is not None]
    return f"{statistics.median(speeds):,.0f} tokens a second" if speeds else ""


def _seconds(attempt: Sequence[Mapping[str, Any]]) -> float:
    """From the first event of an attempt to the last one; what a killed process did after it is not known."""
    try:
        first, last = (datetime.fromisoformat(attempt[i]["time"]) for i in (0, -1))
        return max(0.0, (last - first).total_seconds())
    except (KeyError, TypeError, ValueError):
        return 0.0


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds else ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _component(job: Mapping[str, Any], kind: str) -> str:
    section = job.get(kind)
    return str(section.get("name", "")) if isinstance(section, dict) else ""


def _machine(environment: Mapping[str, Any]) -> str:
    ranks, device, host = (environment.get(key) for key in ("world_size", "device", "host"))
    if device is None:
        return ""
    return f"{ranks} rank{'s' * (ranks != 1)} on {device}, {host}"
