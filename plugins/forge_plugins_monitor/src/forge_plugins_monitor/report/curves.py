"""Sections of curves: what every run logs, what it logs of sources, and all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from forge_plugins_monitor.report.chart import MOST_POINTS, Chart, charts
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import folded

NATS = "nats a token"
TITLES = {
    "loss": ("Training loss", NATS),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm, before clipping", ""),
    "tokens_per_second": ("Throughput", "tokens a second"),
    "mfu": ("Model FLOPs utilisation", "part of the peak"),
    "memory_gib": ("Peak memory of a GPU", "GiB"),
    "step_seconds": ("Time of a step", "seconds"),
    "data_seconds": ("Waiting for data, in a step", "seconds"),
    "tokens": ("Tokens seen", "tokens"),
    "targets": ("Targets of a step", "targets"),
}
"""Titles and units of metrics that every run has. Others stand under their own names."""
_WITH_EVENTS = ("loss", "grad_norm", "tokens_per_second")
_FURTHER_POINTS = 200
"""Of a curve: there may be hundreds of them."""


class Curves(ReportSection):
    """Loss, evaluations, learning rate, gradient norm, throughput, utilisation and memory."""

    title = "Curves"
    place = 20.0

    def render(self, runs: Sequence[RunRecord]) -> str:
        names = _metrics(runs, _is_main)
        return charts(_chart(name, runs) for name in sorted(names, key=_rank))


class Sources(ReportSection):
    """Losses of the sources of a mixture, and the tokens that they have given."""

    title = "Sources"
    place = 30.0

    def render(self, runs: Sequence[RunRecord]) -> str:
        names = _metrics(runs, _is_of_source)
        by_source = sorted(names, key=lambda name: (name.partition("/")[0], name))
        return charts(_chart(name, runs) for name in by_source)


class FurtherMetrics(ReportSection):
    """All that no other section of curves draws, folded away."""

    title = "Further metrics"
    place = 60.0

    def render(self, runs: Sequence[RunRecord]) -> str:
        names = _metrics(runs, lambda name: not _is_main(name) and not _is_of_source(name))
        drawn = charts(_chart(name, runs, _FURTHER_POINTS) for name in names)
        return folded(f"{len(names)} more", drawn)


def _metrics(runs: Sequence[RunRecord], wanted: Callable[[str], bool]) -> list[str]:
    """The names that any run has, each once."""
    names: Iterable[str] = (name for run in runs for name in run.metrics())
    return list(dict.fromkeys(filter(wanted, names)))


_MAIN = ("loss", "eval", "lr", "grad_norm", "tokens_per_second", "mfu", "memory_gib")
"""In the order of the page, each with what stands under it after a slash."""


def _is_main(name: str) -> bool:
    group = name.partition("/")[0]
    return name == "loss" or (group != "loss" and group in _MAIN and not name.endswith("/tokens"))


def _is_of_source(name: str) -> bool:
    return name.startswith(("loss/", "tokens/"))


def _rank(name: str) -> tuple[int, int]:
    """The loss of an evaluation stands before what else it measures, both in the order of the run."""
    return _MAIN.index(name.partition("/")[0]), "loss" not in name


def _chart(name: str, runs: Sequence[RunRecord], most_points: int = MOST_POINTS) -> Chart:
    title, unit = TITLES.get(name, (name, _unit(name)))
    if unit == NATS and not all(map(_has_perplexity, runs)):
        unit = ""
    return Chart(
        title=title,
        unit=unit,
        curves={run: run.curve(name) for run in runs},
        with_events=name in _WITH_EVENTS,
        most_points=most_points,
    )


def _has_perplexity(run: RunRecord) -> bool:
    """Whether its loss is a likelihood, as far as is known: evaluations name the perplexity of such a loss alone."""
    names = run.metrics()
    return "eval/perplexity" in names or "eval/loss" not in names


def _unit(name: str) -> str:
    parts = name.split("/")
    return NATS if "loss" in parts else "tokens" if "tokens" in parts else ""
