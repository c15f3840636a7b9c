from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

SITE = Path(__file__).with_name("site")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Variables of a process that has the stand-in for a GPU; see ``device.cpp``."""
    if sys.platform != "linux" or torch.version.cuda is not None:
        pytest.skip("the stand-in is for Linux, and for a torch that is built without CUDA")
    specification = importlib.util.spec_from_file_location("stand_in_gpu", SITE / "stand_in_gpu.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    own = tmp_path_factory.getbasetemp()
    library = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "libstand_in_gpu.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the tests makes it for all, in half a minute
        if not library.exists():
            made = subprocess.run(module.command(library), capture_output=True, text=True, timeout=600)
            assert made.returncode == 0, made.stderr
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    interpreted = {"TRITON_INTERPRET": "1"}  # Triton's kernels run on the host's memory
    return {"TORCH_STAND_IN_GPU": str(library), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **interpreted}
