"""Autoencoders on the page of ``forge report``: L0 against FVU, and cards of latents."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from forge_core.errors import ConfigError
from forge_plugins_interp.autoencoders.features_config import FeaturesConfig
from forge_plugins_monitor.report.log_log import LogLog, Mark, Series
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import run_name

MODELS = ("batch_topk_sae", "jumprelu_sae", "matryoshka_sae", "topk_sae", "transcoder")


class FeaturesSection(ReportSection):
    """Runs whose model is one of ours. Nothing heavy is imported for others."""

    title = "Latents"
    place = 36.0  # after the curves

    def __init__(self, config: FeaturesConfig, /) -> None:
        self._config = config

    def render(self, runs: Sequence[RunRecord]) -> str:
        ours = [run for run in runs if _is_autoencoder(run)]
        if not ours:
            return ""
        shown = ours[: self._config.runs]
        left = len(ours) - len(shown)
        note = f'<p class="note">{left} more runs of autoencoders have no cards here.</p>' if left else ""
        return _tradeoff(ours) + "".join(self._cards(run) for run in shown) + note

    def _cards(self, run: RunRecord) -> str:
        """The cards of a run, or why there are none."""
        from forge_plugins_interp.autoencoders.dashboard import open_dashboard
        from forge_plugins_interp.autoencoders.feature_page import features_html, style

        try:
            html = style() + features_html(open_dashboard(run.path, self._config, log=lambda _: None))
        except ConfigError as error:
            html = f'<p class="problem">{escape(str(error))}</p>'
        return f"<h3>{run_name(run)}</h3>{html}"


def _is_autoencoder(run: RunRecord) -> bool:
    model = run.job.get("model")
    package, _, name = str(model.get("name") if isinstance(model, dict) else "").rpartition(":")
    return name in MODELS and package in ("", "forge-plugins-interp")


def _tradeoff(runs: Sequence[RunRecord]) -> str:
    """L0 against FVU over evaluations, a line for each run; empty if there are fewer than two points."""
    series = [Series(color=run.index, marks=_marks(run), is_joined=True) for run in runs]
    marks = [mark for one in series for mark in one.marks]
    if len(marks) < 2:
        return ""
    xs, ys = [mark.x for mark in marks], [mark.y for mark in marks]
    return LogLog(
        label="fraction of variance unexplained against active latents a row",
        x_title="L0, active latents a row",
        y_title="FVU",
        x_range=(min(xs) / 1.2, max(xs) * 1.2),
        y_range=(min(ys) / 1.2, max(ys) * 1.2),
        series=series,
        x_ticks=sorted({float(f"{x:.3g}") for x in (min(xs), max(xs))}),
    ).html()


def _marks(run: RunRecord) -> list[Mark]:
    """One for each evaluation, in the order of steps."""
    found = []
    for name in run.metrics():
        prefix, _, last = name.rpartition("/")
        l0 = run.curve(f"{prefix}/l0")
        if name.startswith("eval/") and last == "fvu" and l0.steps:
            of_step = dict(zip(l0.steps, l0.values, strict=True))
            for step, y in zip(run.curve(name).steps, run.curve(name).values, strict=True):
                x = of_step.get(step)
                if x and y and x > 0 and y > 0:
                    found.append(Mark(x, y, f"{run.label}, step {step}: FVU {y:.4g} with {x:.4g} latents a row"))
    return found
