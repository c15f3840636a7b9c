"""``forge-train`` from an index that is a folder, in a fresh environment: what a new user does first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forge_core

pytestmark = pytest.mark.slow

STANDARD = ("data", "dense", "inference", "mirror", "monitor", "optim", "parallel", "plan", "slurm", "studies")
SMALL = ("model.dim=32", "model.n_layers=2", "model.n_heads=2", "train.seq_len=32", "train.batch_size=4")
SHORT = ("train.steps=150", "checkpoint.interval=5", "metrics.interval=1", "eval.interval=150", "eval.batches=1")


@pytest.fixture(scope="module")
def complete(fresh, index):
    """An environment with ``forge-train`` and all that its extras bring."""
    installation = fresh()
    installation.pip("install", "-q", "--find-links", index, "forge-train[hf,interp,moe,testing,torchft,vlm]")
    return installation


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines if "loss" in line]


def test_its_name_brings_the_core_and_the_standard_library(fresh, index):
    report = json.loads(
        fresh().pip("install", "-q", "--dry-run", "--report", "-", "--find-links", index, "forge-train")
    )

    found = {one["metadata"]["name"]: one["metadata"]["version"] for one in report["install"]}
    expected = ["forge-train", "forge-core", *(f"forge-plugins-{name}" for name in STANDARD)]
    assert found == dict.fromkeys(expected, forge_core.__version__)


def test_with_all_extras_every_plugin_works(complete):
    listed = json.loads(complete.forge("plugins", "--json", cwd=complete.folder))

    assert {plugin["distribution"]: plugin["status"] for plugin in listed["plugins"]} == dict.fromkeys(
        complete.ours, "ok"
    )


def test_a_new_configuration_trains_is_interrupted_and_resumes(complete, tmp_path):
    complete.forge("new", "config", "first", cwd=tmp_path)
    complete.forge("validate", "first.toml", cwd=tmp_path)
    command = ("run", "first.toml", *SMALL, *SHORT)

    assert complete.interrupted(*command, cwd=tmp_path) == 3
    before = metrics(tmp_path / "runs" / "first")
    complete.forge(*command, cwd=tmp_path)
    complete.forge(*command, "run.name=straight", cwd=tmp_path)

    resumed = metrics(tmp_path / "runs" / "first")
    assert 5 <= len(before) < 150
    assert resumed[: len(before)] == before
    assert resumed == metrics(tmp_path / "runs" / "straight")
    assert [line["step"] for line in resumed] == list(range(1, 151))
