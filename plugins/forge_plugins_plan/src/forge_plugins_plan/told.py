"""What ``forge plan --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from forge_plugins_plan.ettr_report import EttrReport
from forge_plugins_plan.figures import sources
from forge_plugins_plan.long_job import seconds_between_failures
from forge_plugins_plan.report import Plan


@attrs.frozen(kw_only=True)
class ToldFigure:
    """A figure that was reckoned with."""

    value: float
    unit: str
    source: str


@attrs.frozen(kw_only=True)
class ToldEttr(EttrReport):
    """Of a long job with failures. Times are seconds, and sizes bytes."""

    seconds_between_failures: float
    """Null if there are none."""
    figures: Mapping[str, ToldFigure]  # type: ignore[assignment]  # for programs, with where each comes from
    """By the name that ``--assume`` takes."""


@attrs.frozen(kw_only=True)
class ToldPlan(Plan):
    """What the job would be and take. Sizes are bytes."""

    ettr: ToldEttr | None
    """With ``--ettr``."""


def told_plan(plan: Plan, report: EttrReport | None) -> ToldPlan:
    """The plan for programs."""
    return ToldPlan(**attrs.asdict(plan, recurse=False), ettr=None if report is None else _told_ettr(report))


def _told_ettr(report: EttrReport) -> ToldEttr:
    figures = {
        name: ToldFigure(value=value, unit=unit, source=source) for name, value, unit, source in sources(report.figures)
    }
    facts = attrs.asdict(report, recurse=False) | {"figures": figures}
    return ToldEttr(**facts, seconds_between_failures=seconds_between_failures(report.job, report.figures))
