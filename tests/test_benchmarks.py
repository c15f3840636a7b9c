"""Benchmarks go on working while what they measure changes. What they measure is not looked at here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fork_server

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

SHORT = {
    "end_to_end": ["--steps", "4", "--dim", "32", "--layers", "2", "--vocab", "500", "--seq-len", "32"],
    "ettr": ["--gpus", "1024", "--days", "9", "--lives", "2"],
    "plan_cost": ["--preset", "debug_20m", "--ranks", "64"],
    "report": ["--runs", "2", "--lines", "100", "--rounds", "1"],
    "similarity": ["--layers", "3", "--stimuli", "60", "--features", "20"],
    "startup": ["--repeats", "1"],
    "vlm": ["step", "--dim", "32", "--layers", "1", "--positions", "80", "--rounds", "1"],
}
LONG = {
    "adapters": ["--widths", "64"],
    "callbacks": ["--steps", "10", "--rounds", "1", "--dim", "32"],
    "checkpoint": ["--width", "128", "--rounds", "2"],
    "checkpoint_reads": ["--width", "64", "--rounds", "1"],
    "convert": ["--mib", "4", "--rounds", "1"],
    "data": [],
    "host_memory": ["--width", "64", "--rounds", "2"],
    "installation": ["--rounds", "1"],
    "look_into_demo": ["--steps", "24", "--sae-steps", "24"],
    "losses": ["--tokens", "512", "--dim", "64", "--vocab", "4000", "--chunks", "128"],
    "lost_peers": ["--repeats", "1"],
    "lr_transfer": ["--widths", "32", "64", "--steps", "2"],
    "mixture": [],
    "moe": ["--rounds", "1"],
    "muon_ranks": ["--ranks", "2"],
    "observation": ["--steps", "10", "--rounds", "1", "--dim", "32", "--positions", "64"],
    "optimizers": ["--layers", "1", "--dim", "32", "--rounds", "1"],
    "parity": ["tp2"],
    "plan_memory": [],
    "plan_time": ["--only", "dim 128, 8 layers", "--steps", "5"],
    "resume": [],
    "step_overhead": ["--steps", "10", "--rounds", "1"],
    "store": ["--dim", "32", "--samples", "8", "--rounds", "1"],
    "windows": ["--seq-len", "256", "--window", "128", "--rounds", "1"],
}
OF_WHOLE_PROCESSES = (
    "startup",
    "installation",
    "plan_memory",
    "plan_time",
    "parity",
    "convert",
    "store",
    "look_into_demo",
    "lost_peers",
)
"""They start processes or fork ranks themselves."""
ELSEWHERE = {
    "gpu": "tests/test_gpu.py",
    "layouts": "tests/test_layout_benchmark.py",
    "train_gpu": "tests/test_train_gpu.py",
    "expert_overlap": "needs network namespaces",
    "two_checkouts": "needs another checkout",
}
CASES = [
    *(pytest.param(name, arguments, id=name, marks=pytest.mark.slow) for name, arguments in SHORT.items()),
    *(pytest.param(name, arguments, id=name, marks=pytest.mark.nightly) for name, arguments in LONG.items()),
    pytest.param("vlm", ["modalities", *SHORT["vlm"][1:]], id="vlm modalities", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_it_ends_with_figures(name, arguments):
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]

    run = subprocess.run if name in OF_WHOLE_PROCESSES else fork_server.run
    done = run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\.\d|\d$", done.stdout, re.MULTILINE), done.stdout


def test_none_is_forgotten():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == {*SHORT, *LONG, *ELSEWHERE}
