"""``benchmarks/gpu.py`` asks the stand-in for a GPU, so that a borrowed one is not the first to run its list."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
BY_DAY = ("documents", "tests")
NOT_HERE = {
    "plugins/forge_plugins_monitor/tests/test_gpu_metrics.py::test_a_real_gpu_answers": "the driver's library",
    "plugins/forge_plugins_monitor/tests/test_health.py::test_a_real_gpu_answers": "the driver's library",
    "plugins/forge_plugins_parallel/tests/test_float8_layers.py::test_a_gpu_rounds_as_it_is_emulated[blockwise]": (
        "Triton's kernels on a GPU, and products of blocks"
    ),
    "plugins/forge_plugins_parallel/tests/test_offload_and_prefetch.py::"
    "test_on_cuda_training_is_the_same_in_less_memory": "attention that never has all weights at once",
}
"""Tests that are marked ``gpu``, and what the stand-in lacks for them."""


def asked(stand_in, *arguments):
    options = {"PYTEST_ADDOPTS": " ".join(f"--deselect={name}" for name in NOT_HERE)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", *arguments],
        env={**os.environ, **stand_in, **options},
        capture_output=True,
        text=True,
    )


def by_night(stand_in):
    listed = re.findall(r"^\w+", asked(stand_in, "--list").stdout, re.M)
    assert {*BY_DAY} < {*listed}
    return [name for name in listed if name not in BY_DAY]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_by_day", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["day", "night"])
def test_the_list_works_on_a_gpu(stand_in, is_by_day):
    names = BY_DAY if is_by_day else by_night(stand_in)

    done = asked(stand_in, "--minutes", "14", *(word for name in names for word in ("--only", name)))

    verdicts = dict(re.findall(r"^\| (\w+) \| (ok|failed|skipped)", done.stdout, re.M))
    assert verdicts == dict.fromkeys(names, "ok"), done.stdout + done.stderr
    if is_by_day:
        (passed,) = re.findall(r"^\| tests \| ok \| passed (\d+)", done.stdout, re.M)
        assert int(passed) > 40
