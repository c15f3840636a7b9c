"""Sites, a metric, an intervention and a command on ranks of others, from wheels, in a layout of two parallelisms."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

CONFIG = """
[train]
steps = 2
seq_len = 16
batch_size = 2
precision = "fp32"
[model]
name = "acme-jay:jay"
width = 32
depth = 2
looks = 4
[data]
name = "text_files"
path = "corpus"
validation = 0.5
[optimizer]
name = "adamw"
lr = 1e-2
"""
LAYOUT = ["parallel.tp=2", "parallel.dp_shard=2"]


@pytest.fixture(scope="module")
def folder(installed, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("observation")
    (folder / "corpus").mkdir()
    for number in range(4):
        text = "".join(f"{n} and {number} are {n + number}.\n" for n in range(100))
        (folder / "corpus" / f"{number}.txt").write_text(text)
    (folder / "jay.toml").write_text(CONFIG)
    look = ["-m", "forge_core", "reversed-look", "runs/jay"]
    extract = ["-m", "forge_core", "extract", "runs/jay", "--sites", "blocks.*.*", "--samples", "6", "--out"]
    installed.in_turn(
        ["-m", "forge_core", "run", "jay.toml"],
        [*look, "alone.pt"],
        [*look, "ranks.pt", "--nproc", "4", *LAYOUT],
        [*extract, "alone"],
        [*extract, "ranks", "--nproc", "4", *LAYOUT],
        cwd=folder,
    )
    return folder


def test_values_and_changes_are_those_of_one_process(folder: Path) -> None:
    alone, ranks = (torch.load(folder / f"{name}.pt") for name in ("alone", "ranks"))
    assert alone.keys() == ranks.keys() > {"blocks.1.z", "blocks.0.mlp_post", "changed"}
    for name, value in alone.items():
        assert torch.allclose(ranks[name], value, atol=1e-5), name
    assert (alone["changed"] - alone["logits"]).abs().max() > 1e-3


def test_stores_of_two_layouts_are_alike_by_its_metric(installed, folder: Path) -> None:
    printed = installed.forge(
        *("compare", "alone", "ranks", "--metric", "mean_distance", "--sites", "blocks.*.mlp_out"),
        *("--out", "means.csv"),
        cwd=folder,
    )

    assert "mean_distance of 96 rows of 6 stimuli" in printed
    with (folder / "means.csv").open(newline="") as file:
        rows = {(row["site_a"], row["site_b"]): float(row["value"]) for row in csv.DictReader(file)}
    assert rows["blocks.0.mlp_out", "blocks.0.mlp_out"] < 1e-5
    assert rows["blocks.0.mlp_out", "blocks.1.mlp_out"] > 1e-3
