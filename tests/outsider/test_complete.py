"""``forge-train`` from an index that is a folder, in a fresh environment: what a new user does first."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import forge_core

pytestmark = pytest.mark.slow

STANDARD = (
    "data",
    "dense",
    "inference",
    "mirror",
    "monitor",
    "optim",
    "parallel",
    "plan",
    "slurm",
    "studies",
    "weights",
)
SMALL = ("model.dim=32", "model.n_layers=2", "model.n_heads=2", "train.seq_len=32", "train.batch_size=4")
STEPS = 100
SHORT = (f"train.steps={STEPS}", "metrics.interval=1", f"eval.interval={STEPS}", "eval.batches=1")
RUN = ("run", "first.toml", *SMALL, *SHORT, "data.pattern=**/c*.py")
"""Of the files of Python's library a few: all are 20 MB, to be read at each start."""
OFTEN = "checkpoint.interval=5"
"""In a run that is interrupted after its first checkpoint."""


@pytest.fixture(scope="module")
def complete(fresh, index):
    """An environment with ``forge-train`` and all that its extras bring."""
    installation = fresh()
    replicas = "forge-train[torchft]" if find_spec("torchft") else "forge-plugins-torchft"  # no wheel for this Python
    extras = "forge-train[hf,interp,moe,testing,vlm]"
    installation.pip("install", "-q", "--find-links", index, extras, replicas)
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


@pytest.fixture(scope="module")
def first(complete, tmp_path_factory):
    """The folder of a run of ``forge new config`` that was interrupted and begun again, and its metrics until then."""
    folder = tmp_path_factory.mktemp("first")
    complete.forge("new", "config", "first", cwd=folder)
    complete.forge("validate", "first.toml", cwd=folder)
    assert complete.interrupted(*RUN, OFTEN, cwd=folder) == 3
    before = metrics(folder / "runs" / "first")
    complete.trained(*RUN, cwd=folder)
    return folder, before


def test_a_new_configuration_trains_is_interrupted_and_resumes(complete, first):
    folder, before = first

    complete.trained(*RUN, "run.name=straight", cwd=folder)

    resumed = metrics(folder / "runs" / "first")
    assert 5 <= len(before) < STEPS
    assert resumed[: len(before)] == before
    assert resumed == metrics(folder / "runs" / "straight")
    assert [line["step"] for line in resumed] == list(range(1, STEPS + 1))


@pytest.mark.nightly
def test_what_it_has_trained_is_evaluated_sampled_reported_and_converted(complete, first):
    folder, _ = first

    evaluated = complete.trained("eval", "runs/first", cwd=folder)
    sampled = complete.trained("generate", "runs/first", "--prompt", "def ", "--max-new-tokens", "8", cwd=folder)
    complete.forge("report", "runs", "--out", "report.html", cwd=folder)
    complete.trained("convert", "runs/first", "--to", "huggingface", "--out", "exported", cwd=folder)
    complete.trained("convert", "exported", "--to", "forge", "--out", "back", cwd=folder)

    assert "eval/loss" in evaluated
    assert len(sampled) > len("def ")
    assert "first" in (folder / "report.html").read_text()
    assert {path.name for path in (folder / "exported").iterdir()} >= {"config.json", "model.safetensors"}
    assert {path.name for path in (folder / "back").iterdir()} >= {"checkpoint", "train.toml"}
