"""``forge report`` of runs that were really trained."""

import json
import re

import pytest

from forge_core.cli import main


def test_the_page_has_the_values_of_a_run_that_was_stopped_and_resumed(tiny, capfd):
    tiny.completed("train.steps=5", "checkpoint.interval=5", "eval.interval=5")
    lines = tiny.completed("checkpoint.interval=5", "eval.interval=5")
    tiny.completed("run.name=other", "optimizer.lr=2e-3")

    out = tiny.folder / "report.html"
    code = main(["report", str(tiny.path()), str(tiny.path("other")), "--out", str(out)])

    assert code == 0
    assert "note:" not in capfd.readouterr().err
    html = out.read_text()
    blocks = [json.loads(text) for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html)]
    charts = {chart["title"]: chart["curves"] for chart in blocks if isinstance(chart, dict)}
    (runs,) = (block for block in blocks if isinstance(block, list))
    assert [run["label"] for run in runs] == ["tiny", "other"]
    expected = [line["loss"] for line in lines if "loss" in line]
    assert charts["Training loss"][0]["y"] == pytest.approx(expected, rel=1e-5)
    assert [curve["x"] for curve in charts["eval/loss"]] == [[5, 10]]
    assert [event[:2] for event in runs[0]["events"]] == [[5, "saved"], [10, "saved"], [5, "resumed"]]
    assert "<td>10 of 10</td>" in html
    assert re.search(r'<th scope="row">optimizer.lr</th><td>0.01</td><td>0.002</td>', html)


PLUGIN = """
    from forge_core.api import Component, hookimpl

    def section(name):
        return Component(
            name=name, summary="of others", factory=f"acme.sections:{name}", config="acme.config:Config"
        )

    @hookimpl(optionalhook=True)
    def forge_report_sections():
        yield section("broken")
        yield section("mine")
        yield section("wrong")
"""
SECTIONS = """
    from forge_plugins_monitor.report.chart import Chart, charts
    from forge_plugins_monitor.report.section import ReportSection

    class mine(ReportSection):
        title, place = "Mine", 25.0

        def __init__(self, config, /): ...

        def render(self, runs):
            return charts([Chart(title="lr again", curves={run: run.curve("lr") for run in runs})])

    class broken(mine):
        def render(self, runs):
            raise ValueError("no <picture>")

    def wrong(config, /):
        return "no section"
"""
CONFIG = """
    import attrs

    @attrs.frozen(kw_only=True)
    class Config:
        "No keys."
"""


def test_a_section_of_another_package_stands_in_its_place_and_one_that_fails_is_told(
    tmp_path, make_distribution, capfd
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.toml").write_text("[train]\nsteps = 1\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "lr": 0.5, "norm": 1.0}\n')
    files = {
        "acme/plugin.py": PLUGIN,
        "acme/sections.py": SECTIONS,
        "acme/config.py": CONFIG,
    }
    make_distribution("acme", files=files)

    code = main(["report", str(run), "--out", str(tmp_path / "report.html")])

    html = (tmp_path / "report.html").read_text()
    assert code == 0
    ids = re.findall(r'<section id="(\w+)">', html)
    assert ids == ["summary", "curves", "broken", "mine", "configurations", "further_metrics"]
    assert html.count('"title":"lr again"') == 1
    assert "has failed: ValueError: no &lt;picture&gt;" in html
    said = capfd.readouterr().err
    assert "the section 'acme:broken' has failed: ValueError: no <picture>" in said
    assert "'acme:wrong'" in said
    assert "must return a forge_plugins_monitor.report.section.ReportSection" in said
