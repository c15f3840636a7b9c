"""Trains one small job after the other on the CPU and on the stand-in: ``python trainings.py JOBS FOLDER``.

``JOBS`` is a JSON file: a list of ``name``, ``sparse``, ``settings``, and ``like``, the job whose losses on the CPU it
must have. Each line that is printed is the answer about one.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import stand_in_gpu
import torch
from gpu_steps.small_run import train
from gpu_steps.step import Setting


def main(jobs: Path, folder: Path) -> None:
    devices = {}
    for kind in ("cpu", "cuda"):
        devices[kind] = Setting(device=torch.device(kind), tiny=True, folder=folder / kind)
        devices[kind].folder.mkdir(parents=True)
    on_cpu: dict[str, list[float]] = {}
    for job in json.loads(jobs.read_text()):
        name, settings = job["name"], [*job["settings"], "train.steps=3"]
        if job["like"] == name:
            on_cpu[name] = [*train(devices["cpu"], name, *settings, sparse=job["sparse"]).losses]
        losses = train(devices["cuda"], name, *settings, sparse=job["sparse"]).losses
        few, many = (_waits(devices["cuda"], job, steps) for steps in (3, 5))
        answer = {"name": name, "cpu": on_cpu[job["like"]], "gpu": [*losses], "waits": many - few}
        print(json.dumps(answer), flush=True)


def _waits(device: Setting, job: dict[str, Any], steps: int) -> Counter[str]:
    """Of a run of which no step but the first and the last is logged."""
    unlogged = (f"train.steps={steps}", "metrics.interval=1000")
    with stand_in_gpu.waits() as waits:
        train(device, f"{job['name']}-{steps}", *job["settings"], *unlogged, sparse=job["sparse"])
    return waits


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
