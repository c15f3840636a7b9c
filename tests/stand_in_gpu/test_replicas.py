"""Replicas on GPUs, whose sums torchft does by its own groups of NCCL: by the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
[run]
name = "both"
[model]
name = "transformer"
dim = 32
n_layers = 1
n_heads = 4
[data]
name = "synthetic"
vocab_size = 64
[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[metrics]
interval = 1
[anomalies]
give_up_after = 0
[checkpoint]
interval = 0
"""
TORCHFT = """
[[callbacks]]
name = "torchft"
min_replicas = 2
"""


@pytest.mark.nightly
def test_two_of_them_train_as_one_process_does(stand_in, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    (tmp_path / "one.toml").write_text(JOB)
    (tmp_path / "both.toml").write_text(JOB + TORCHFT)

    one = forge(tmp_path, "run", "one.toml", "run.name=one", "run.device=cpu", "train.batch_size=4")
    both = forge(tmp_path, "replicas", "both.toml", "--replicas", "2", "--nproc", "1", environment=stand_in)

    assert "UserWarning" not in both
    assert one.count("step ") == 4
    expected = losses(tmp_path / "runs/one")
    for replica in ("replica_0", "replica_1"):
        assert losses(tmp_path / "runs/both" / replica) == pytest.approx(expected, rel=1e-4)


def forge(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "forge_core", *arguments],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]
