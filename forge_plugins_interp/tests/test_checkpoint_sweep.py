"""The same extraction over the checkpoints of a run: how its layers come to be what they are."""

from __future__ import annotations

import csv

import pytest

from forge_core.cli import main
from forge_plugins_interp.metrics.cka import linear_cka
from forge_plugins_interp.store import Store

SITE = "blocks.1.resid_post"


def test_checkpoints_of_a_run_become_stores_that_can_be_compared(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["train.steps=12", "checkpoint.interval=4", "checkpoint.keep_last=10", f"run.dir={tmp_path / 'runs'}"]
    assert main(["run", str(run.parent.parent / "job.toml"), *settings]) == 0
    checkpoints = sorted((tmp_path / "runs/tiny/checkpoints").glob("step_*"))

    for checkpoint in checkpoints:
        out = tmp_path / "sweep" / checkpoint.name
        assert main(["extract", str(checkpoint), "--sites", SITE, "--samples", "8", "--out", str(out)]) == 0

    stores = [Store(folder) for folder in sorted((tmp_path / "sweep").iterdir())]
    steps = [store.manifest.origin["step"] for store in stores]
    assert {4, 8, 12} <= set(steps)
    trajectory = {
        step: linear_cka(one.array(SITE), stores[-1].array(SITE)) for step, one in zip(steps, stores, strict=True)
    }
    assert trajectory[12] == pytest.approx(1)
    assert trajectory[4] < trajectory[8] < 1
    first, last = (str(tmp_path / "sweep" / f"step_{step:08}") for step in (4, 12))
    assert main(["compare", first, last, "--out", "a.csv"]) == 0
    with (tmp_path / "a.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["value"]) == pytest.approx(trajectory[4])
