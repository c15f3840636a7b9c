"""The packages in ``examples/``, each from its wheel: their examples show what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributions import ROOT

pytestmark = pytest.mark.slow

NAMES = sorted(path.parent.name for path in ROOT.glob("examples/*/pyproject.toml"))


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_visits_of_relu_routing_go_from_half_of_all_experts_to_those_wanted(installed):
    """The three stages of the paper: more and more experts, fewer and fewer, and then as many as are wanted."""
    folder = installed.folder / "relu-router"

    installed.trained("run", "example.toml", "metrics.interval=1", cwd=folder)

    lines = [line for line in metrics(folder / "runs" / "example") if "loss" in line]
    layers = [[line[key] for line in lines] for key in lines[0] if key.startswith("router_visits")]
    assert len(layers) == 2
    assert [round(visits[0]) for visits in layers] == [4, 4]
    assert all(max(visits[:50]) > 5 for visits in layers)
    assert all(sum(visits[-50:]) / 50 == pytest.approx(2, abs=0.5) for visits in layers)
    assert lines[-1]["loss"] < 2.5


@pytest.mark.nightly
def test_the_study_of_caution_has_a_row_for_each_run(installed):
    folder = installed.folder / "cautious-adamw"
    short = ("train.steps=40", "eval.interval=40", "eval.batches=2", "scheduler.warmup_steps=5")

    printed = installed.forge("sweep", "example.toml", "--sweep", "optimizer.cautious=true,false", *short, cwd=folder)

    losses = {row.split()[0]: float(row.replace("*", "").split()[-1]) for row in printed.splitlines() if " 40 " in row}
    assert losses["true"] < losses["false"]


@pytest.mark.nightly
def test_chords_are_learned(installed):
    folder = installed.folder / "mu-law-audio"
    installed.succeed("tones.py", "tones", cwd=folder)

    installed.trained("run", "example.toml", cwd=folder)

    (evaluated,) = [line for line in metrics(folder / "runs" / "example") if "eval/loss" in line]
    assert evaluated["eval/loss"] < 3.5  # nats a moment; 5.5 before anything is learned


def test_each_has_a_readme_that_begins_with_its_example():
    assert NAMES == ["cautious-adamw", "mu-law-audio", "relu-router"]
    listed = (ROOT / "examples" / "README.md").read_text()
    for name in NAMES:
        assert f"]({name}/README.md)" in listed
        assert "forge run example.toml" in (ROOT / "examples" / name / "README.md").read_text()
