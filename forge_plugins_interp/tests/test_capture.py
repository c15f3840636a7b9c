"""The callback ``capture``: what training computes, in a store of each step, in any layout."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import fork_server
from forge_core.errors import ConfigError
from forge_plugins_interp.store import Store
from parity_matrix.selection import by_day_or_night

CAPTURE = """
[[callbacks]]
name = "capture"
interval = 2
sites = ["embed", "blocks.*.resid_post", "blocks.1.z"]
"""


def run_forge(folder, *arguments):
    command = [sys.executable, "-m", "forge_core", "run", "job.toml", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return fork_server.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def train(folder, name, *more):
    done = run_forge(folder, f"run.name={name}", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / name / "captures"


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("capture")
    text = (run.parent.parent / "job.toml").read_text().replace(f"{run.parent}", f"{folder}/runs")
    text = text.replace("steps = 2", "steps = 5").replace("batch_size = 2", "batch_size = 1\ngrad_accumulation = 4")
    (folder / "job.toml").write_text(text + CAPTURE)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return train(folder, "alone")


def test_every_captured_step_is_a_store_of_its_batch(alone):
    assert sorted(path.name for path in alone.iterdir()) == ["step_00000002", "step_00000004"]
    store = Store(alone / "step_00000004")

    assert sorted(store.sites) == ["blocks.0.resid_post", "blocks.1.resid_post", "blocks.1.z", "embed"]
    assert store.ids.tolist() == [0, 1, 2, 3]
    assert store.array("blocks.1.z").shape == (4 * 32, 4, 8)
    assert store.manifest.origin["step"] == 4
    assert len({tuple(store.tokens(sample).tolist()) for sample in range(4)}) == 4
    earlier = Store(alone / "step_00000002")
    assert not torch.equal(earlier.array("embed"), store.array("embed"))


LAYOUTS = {
    "fsdp2": ["train.grad_accumulation=2"],
    "tp2": ["parallel.tp=2"],
    "cp2": ["parallel.cp=2"],
    "pp2": ["parallel.pp=2"],
}


@pytest.mark.parametrize("layout", by_day_or_night(LAYOUTS, {"fsdp2", "tp2"}))
def test_every_layout_writes_the_same_values(folder, alone, layout):
    found = train(folder, layout, "--nproc", "2", *LAYOUTS[layout])

    for step in ("step_00000002", "step_00000004"):
        mine, theirs = Store(alone / step), Store(found / step)
        assert sorted(mine.sites) == sorted(theirs.sites)
        for site in mine.sites:
            for sample in range(4):
                assert torch.allclose(theirs.read(site, sample), mine.read(site, sample), atol=2e-4), (site, sample)


def test_the_store_of_a_run_that_fails_is_not_complete_before_its_shards_are(folder, monkeypatch):
    """Until all ranks have written, it says so; what an earlier step wrote is whole."""
    failing = "anomalies={roll_back_after=1, give_up_after=0}"
    keys = 'callbacks=[{name="capture", interval=1}]'
    done = run_forge(folder, "run.name=failed", keys, "optimizer.lr=1e30", failing)

    assert done.returncode == 4, done.stdout + done.stderr
    first, *_, last = sorted((folder / "runs" / "failed" / "captures").iterdir())
    assert Store(first).array("blocks.0.resid_post").isfinite().all()
    with pytest.raises(ConfigError, match="is not complete"):
        Store(last)


def test_training_is_not_changed(folder, alone):
    train(folder, "plain", "callbacks=[]")

    captured, plain = ((folder / "runs" / name / "metrics.jsonl").read_text() for name in ("alone", "plain"))
    losses = [[line.split('"loss": ')[1].split(",")[0] for line in text.splitlines()] for text in (captured, plain)]
    assert losses[0] == losses[1]


def test_a_reduced_capture_has_a_row_a_sample(folder):
    keys = 'callbacks=[{name="capture", interval=4, over="mean", features=6, dtype="bfloat16"}]'
    store = Store(train(folder, "reduced", keys) / "step_00000004")

    values = store.array("blocks.0.resid_post")
    assert values.shape == (4, 6)
    assert values.dtype == torch.bfloat16


def test_values_that_float16_does_not_have_are_told(folder):
    keys = 'callbacks=[{name="capture", interval=2, sites=["embed"], dtype="float16"}]'
    done = run_forge(folder, "run.name=narrow", keys, "train.steps=2", "optimizer.lr=1e8")

    assert "site embed has values beyond 65,504, the largest of float16" in done.stderr
    assert "are stored as infinite; use bfloat16" in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ['callbacks=[{name="capture", sites=["blocks.*.resid_pst"]}]'],
            "site 'blocks.*.resid_pst': the model has none",
        ),
        (['callbacks=[{name="capture", interval=0}]'], "interval"),
        (
            ['callbacks=[{name="capture", interval=1, sites=["logits"]}]', 'loss.name="chunked_cross_entropy"'],
            "site logits: training does not compute it",
        ),
    ],
)
def test_bad_input_is_a_sentence(folder, settings, message):
    done = run_forge(folder, "run.name=wrong", *settings)

    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
