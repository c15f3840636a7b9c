"""Events of runs: the marks in charts, and the section that lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_core.config.describe import without_passwords
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import listing

MARKED = ("saved", "resumed", "skipped", "rolled_back")
"""Events with a mark in charts."""
_MOST_MARKS = 100
"""Of one kind and run; more could not be kept apart."""
_MOST_LISTED = 200
"""Of one run: the newest."""
_WORDS = {
    "skipped": "step left out",
    "rolled_back": "rolled back",
    "save_failed": "saving failed",
    "mirror_failed": "mirroring failed",
    "export_failed": "exporting failed",
    "export_skipped": "export left out",
    "data_damaged": "data damaged",
    "step_again": "step done again",
    "taken_over": "taken over",
}
_IN_NUMBERS = ("saved", "mirrored", "kept_in_memory", "exported")
"""Events that are regular and many: the list says how many there are."""


class Incidents(ReportSection):
    """Starts, ends, steps that were left out, rollbacks, and all that has failed."""

    title = "Events"
    place = 40.0

    def render(self, runs: Sequence[RunRecord]) -> str:
        rows: list[tuple[str, ...]] = []
        for run in runs:
            told = [event for event in run.events if event["event"] not in _IN_NUMBERS]
            rows += [_counted(run, name) for name in _IN_NUMBERS if any(one["event"] == name for one in run.events)]
            if len(told) > _MOST_LISTED:
                rows.append((run.label, "", "", f"{len(told) - _MOST_LISTED:,} earlier ones", ""))
            rows += [
                (
                    run.label,
                    str(event.get("time", ""))[:19].replace("T", " "),
                    _step(event),
                    name_of(event),
                    more(event),
                )
                for event in told[-_MOST_LISTED:]
            ]
        return listing(("run", "time (UTC)", "step", "event", ""), rows)


def marks(run: RunRecord) -> list[tuple[int, str, str]]:
    """Step, event, and words of the events to mark in charts."""
    found = []
    for kind in MARKED:
        events = [event for event in run.events if event["event"] == kind and type(event.get("step")) is int]
        every = -(-len(events) // _MOST_MARKS) or 1
        found += [(event["step"], kind, f"{name_of(event)} {more(event)}".strip()) for event in events[::every]]
    return found


def name_of(event: Mapping[str, Any]) -> str:
    """The event in words."""
    name = str(event["event"])
    return _WORDS.get(name, name)


def more(event: Mapping[str, Any]) -> str:
    """The facts of an event that say most about it, in a few words; empty where there are none."""
    facts = [f"to step {event['to_step']}"] if "to_step" in event else []
    facts += [without_passwords(str(event[key])) for key in ("reason", "error") if event.get(key)]
    if event.get("checkpoint"):
        facts.append(f"from {event['checkpoint']}")
    return ", ".join(facts)


def _counted(run: RunRecord, name: str) -> tuple[str, ...]:
    events = [event for event in run.events if event["event"] == name]
    return (
        run.label,
        str(events[-1].get("time", ""))[:19].replace("T", " "),
        _step(events[-1]),
        name,
        f"{len(events):,} times, this is the last one",
    )


def _step(event: Mapping[str, Any]) -> str:
    step = event.get("step")
    return f"{step:,}" if type(step) is int else ""
