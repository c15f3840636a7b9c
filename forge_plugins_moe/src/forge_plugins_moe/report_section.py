"""The experts on the page of ``forge report``: who has how much of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from forge_core.errors import ConfigError
from forge_plugins_moe.heat_map import latest, legend, load_over_mean, map_of_layers
from forge_plugins_moe.load_history import FILE, read_loads
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import run_name


class Experts(ReportSection):
    """Runs that have the callback ``experts``."""

    title = "Experts"
    place = 35.0  # after the curves and the sources, before what happened

    def render(self, runs: Sequence[RunRecord]) -> str:
        maps = [_of(run) for run in runs if (run.path / FILE).exists()]
        if not maps:
            return ""
        words = "Assignments to each expert over the mean of its layer, in the last tenth of the logged steps."
        return f'<p class="note">{words}</p>{legend()}{"".join(maps)}'


def _of(run: RunRecord) -> str:
    """The map of a run, or what is wrong with its file."""
    try:
        recent = latest(read_loads(run.path))
    except ConfigError as error:
        return f'<p class="problem">{escape(str(error))}</p>'
    means = load_over_mean(recent)
    busiest = max(means, key=lambda layer: max(means[layer]))
    said = f"steps {recent[0].step} to {recent[-1].step}; the busiest is in {busiest}: {max(means[busiest]):.2f}"
    return f'<p>{run_name(run)}, {escape(said)}</p><div class="wide">{map_of_layers(means)}</div>'
