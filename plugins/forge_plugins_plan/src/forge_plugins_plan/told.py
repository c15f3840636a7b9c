"""What ``forge plan --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from forge_plugins_plan.ettr_report import EttrReport
from forge_plugins_plan.figures import sources
from forge_plugins_plan.long_job import seconds_between_failures
from forge_plugins_plan.report import Plan
from forge_plugins_plan.run_figures import RunFigures
from forge_plugins_plan.search import Layout, Search
from forge_plugins_plan.search_report import why_slower


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
class ToldLayout(Layout):
    """A layout that has been simulated. Times are seconds, and sizes bytes."""

    why_slower: str
    """A sentence; empty for the first, and for layouts that do not fit."""


@attrs.frozen(kw_only=True)
class ToldSearch(Search):
    """The fastest layouts, and what became of the others."""

    best: Sequence[ToldLayout]
    """The ones that fit, fastest first."""
    too_large: Sequence[ToldLayout]
    """Simulated, and they do not fit; fastest first."""


@attrs.frozen(kw_only=True)
class ToldPlan(Plan):
    """What the job would be and take. Sizes are bytes, and times seconds."""

    search: ToldSearch | None
    """With ``--search``."""
    ettr: ToldEttr | None
    """With ``--ettr``."""
    run: RunFigures | None
    """The run whose directory was given in place of a configuration."""


def told_plan(plan: Plan, found: Search | None, report: EttrReport | None, run: RunFigures | None) -> ToldPlan:
    """The plan for programs."""
    facts = attrs.asdict(plan, recurse=False)
    search = None if found is None else _told_search(found)
    return ToldPlan(**facts, search=search, ettr=None if report is None else _told_ettr(report), run=run)


def _told_search(found: Search) -> ToldSearch:
    best = [
        _told_layout(one, why_slower(one, found.best[0]) if number else "") for number, one in enumerate(found.best)
    ]
    too_large = [_told_layout(one, "") for one in found.too_large]
    return ToldSearch(**attrs.asdict(found, recurse=False) | {"best": best, "too_large": too_large})


def _told_layout(layout: Layout, why: str) -> ToldLayout:
    return ToldLayout(**attrs.asdict(layout, recurse=False), why_slower=why)


def _told_ettr(report: EttrReport) -> ToldEttr:
    figures = {
        name: ToldFigure(value=value, unit=unit, source=source) for name, value, unit, source in sources(report.figures)
    }
    facts = attrs.asdict(report, recurse=False) | {"figures": figures}
    return ToldEttr(**facts, seconds_between_failures=seconds_between_failures(report.job, report.figures))
