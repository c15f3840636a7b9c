"""The page: sections under each other, with the style and the script in it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib import metadata, resources

from forge_core.config.builder import ComponentBuilder, output_of
from forge_core.errors import ForgeError
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_plugins_monitor.report.chart import as_json
from forge_plugins_monitor.report.incidents import marks
from forge_plugins_monitor.report.run_record import RunRecord
from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import run_name

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing from anywhere, also for sections of others."""


def page(runs: Sequence[RunRecord], catalog: Catalog) -> tuple[str, list[str]]:
    """The HTML of a report, and a sentence for each thing that is missing in it."""
    sections, problems = _sections(catalog)
    problems += [problem for run in runs for problem in run.problems]
    parts = []
    for entry, section in sections:
        try:
            with output_of(entry.plugin.distribution):
                html = section.render(runs)
        except Exception as error:  # noqa: BLE001  # a plugin's mistake must not cost the rest of the page
            why = f"the section '{entry.qualified_name}' has failed: {type(error).__name__}: {error}"
            problems.append(why)
            html = f'<p class="problem">{escape(why)}</p>'
        if html:
            parts.append(
                f'<section id="{escape(entry.component.name)}"><h2>{escape(section.title)}</h2>{html}</section>'
            )
    return _whole(runs, parts, problems), problems


def _sections(catalog: Catalog) -> tuple[list[tuple[CatalogEntry, ReportSection]], list[str]]:
    """All that are installed, in the order of the page."""
    build = ComponentBuilder(catalog)
    sections, problems = [], []
    for entry in catalog.components("report_section"):
        try:
            catalog.lookup("report_section", entry.qualified_name)
            sections.append((entry, build(build.resolve("report_section", entry.qualified_name))))
        except Exception as error:  # noqa: BLE001  # as above
            said = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
            problems.append(f"the section '{entry.qualified_name}' cannot be made: {said}")
    return sorted(sections, key=lambda one: one[1].place), problems


def _whole(runs: Sequence[RunRecord], parts: Sequence[str], problems: Sequence[str]) -> str:
    title = escape(" · ".join(run.label for run in runs))
    facts = [{"label": run.label, "events": marks(run)} for run in runs]
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{run.index}">{run_name(run)}</label>' for run in runs
    )
    said = "".join(f'<p class="problem">{escape(problem)}</p>' for problem in problems)
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{_file("page.css")}</style>
</head>
<body>
<h1>{title}</h1>
<p class="made">forge report, {escape(now)}, forge-core {escape(metadata.version("forge-core"))}</p>
<noscript><p class="problem">Curves are drawn by a script in this page, which is switched off.</p></noscript>
{said}
<div id="legend" role="group" aria-label="runs">{boxes}</div>
{body}
<footer>▴ saved · ↻ resumed · ✕ step left out · ↶ rolled back</footer>
<script type="application/json" id="runs">{as_json(facts)}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
