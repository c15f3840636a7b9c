"""The benchmark of training on a GPU can be tried out without one."""

import re
import sys
from pathlib import Path

import pytest
import torch

import fork_server

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "train_gpu.py"

MODEL = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 2
max_seq_len = 64
vocab_size = 100
"""


def _benchmark(*arguments, script=SCRIPT):
    return fork_server.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.nightly
def test_each_job_is_run_and_becomes_a_row(tmp_path):
    model = tmp_path / "small.toml"
    model.write_text(MODEL)
    jobs = ["--config", str(model), "--recompute", "auto", "--recompute", "full", "--device", "cpu"]

    done = _benchmark(*jobs, "--steps", "3", "--warmup", "1", "train.seq_len=64", "parallel.passes.compile=false")

    assert done.returncode == 0, done.stderr
    rows = re.findall(r"\| small \| bf16 \| (\w+) \| ([\d,]+) \|.*\| ([\d.]+) \([\d.]+ to [\d.]+\) \|", done.stdout)
    assert [recomputed for recomputed, _, _ in rows] == ["auto", "full"], done.stdout
    for _, speed, seconds in rows:  # 4 sequences of 64 tokens, twice a step
        assert float(speed.replace(",", "")) == pytest.approx(512 / float(seconds), rel=0.1)


def test_a_job_that_cannot_be_run_says_why_in_its_row(tmp_path):
    model = tmp_path / "small.toml"
    model.write_text(MODEL)

    done = _benchmark("--config", str(model), "--recompute", "none", "--device", "cpu", "train.seq_len=65")

    assert done.returncode == 0, done.stderr
    assert re.search(r"\| small \| bf16 \| none \| .*64 is shorter than train.seq_len = 65 \|", done.stdout), (
        done.stdout
    )


@pytest.mark.nightly
def test_a_sparse_model_is_measured_beside_the_dense_one_of_as_many_active_parameters():
    """As the benchmark itself says that one can try it out."""
    script = SCRIPT.with_name("moe.py")
    command = re.search(r"``python benchmarks/moe\.py (--gpu --device cpu [^`]*)``", script.read_text())

    done = _benchmark(*command[1].split(), script=script)

    assert done.returncode == 0, done.stderr
    rows = re.findall(r"\| (\w+) \| fp32 \| (\w+) \| [\d,]+ \|", done.stdout)
    assert rows == [("moe_small", "none"), ("moe_small", "full"), ("dense", "none"), ("dense", "full")], done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_what_it_needs():
    done = _benchmark()

    assert done.returncode == 1
    assert re.fullmatch(r"train_gpu\.py measures a CUDA GPU, and torch sees none here; .*\n", done.stderr)
