"""The machine: its names, and the two rates by which everything else is judged."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_steps.step import Figures, Setting


def device_facts(setting: Setting) -> Figures:
    """TFLOP/s of a bf16 product of random matrices, and GB/s of a copy, read and written bytes counted."""
    side = 512 if setting.tiny else 8192
    left, right = (torch.randn(side, side, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**20 if setting.tiny else 2**30, device=setting.device)
    target = torch.empty_like(source)
    product = seconds_of(lambda: left @ right, setting)
    copy = seconds_of(lambda: target.copy_(source), setting)
    return {
        **names_of(setting.device),
        "matmul_tflops": round(2 * side**3 / product / 1e12, 1),
        "copy_gb_per_s": round(2 * source.nbytes / copy / 1e9),
    }


def names_of(device: torch.device) -> dict[str, str]:
    """GPU, driver, torch, CUDA, cuDNN and commit, as far as the machine tells."""
    names = {"torch": torch.__version__, "commit": said("git", "rev-parse", "--short", "HEAD")}
    if device.type != "cuda":
        return {"device": "cpu", **names}
    gpu = said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return {
        "device": gpu or torch.cuda.get_device_name(device),
        **names,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def said(*command: str) -> str:
    """The output of a program, or nothing where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def seconds_of(work: Callable[[], object], setting: Setting, rounds: int = 10) -> float:
    """The median of ``rounds``, after three that are not counted."""
    times = []
    for number in range(3 + rounds):
        setting.wait()
        begun = time.perf_counter()
        work()
        setting.wait()
        if number >= 3:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)
