"""The stand-in refuses what a GPU refuses, and counts what makes the host wait for one."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
PROGRAM = """
import json, torch
from stand_in_gpu import waits

gpu, host = torch.arange(6.0, device="cuda"), torch.arange(6.0)
pinned = host.pin_memory()
asked = {
    "scalar": lambda: gpu + torch.tensor(1.0), "value": lambda: gpu.sum().item(), "mask": lambda: gpu[gpu > 2],
    "copy": lambda: gpu.cpu(), "pinned": lambda: pinned.to("cuda", non_blocking=True),
    "sum": lambda: gpu + host, "stack": lambda: torch.stack([gpu[0], host[0]]), "GPUs": lambda: gpu + gpu.to("cuda:1"),
}
answers = {}
for name, ask in asked.items():
    with waits() as counted:
        try:
            ask()
            answers[name] = sum(counted.values()) > 0
        except RuntimeError as error:
            answers[name] = "device" in str(error) or "two GPUs" in str(error)
            assert answers[name], error
            answers[name] = "refused"
print(json.dumps(answers))
"""


def test_it_refuses_two_devices_and_counts_what_is_waited_for(stand_in):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **stand_in}, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "scalar": False,
        "value": True,
        "mask": True,
        "copy": True,
        "pinned": False,
        "sum": "refused",
        "stack": "refused",
        "GPUs": "refused",
    }
