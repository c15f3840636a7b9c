"""``benchmarks/gpu.py`` asks the stand-in for a GPU, so that a borrowed one is not the first to run its list."""

import importlib
import re
from argparse import Namespace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
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


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_list_works_on_a_gpu(stand_in, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = importlib.import_module("gpu")
    for name, value in stand_in.items():  # of the processes of the steps
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"--deselect={name}" for name in NOT_HERE))

    script.run_all(script.STEPS, Namespace(minutes=28, device="cuda", tiny=True, out=None))

    said = capfd.readouterr().out
    verdicts = dict(re.findall(r"^\| (\w+) \| (ok|failed|skipped)", said, re.M))
    assert verdicts == dict.fromkeys((step.name for step in script.STEPS), "ok"), said
    (passed,) = re.findall(r"^\| tests \| ok \| passed (\d+)", said, re.M)
    assert int(passed) > 40
