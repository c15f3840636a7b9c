"""Trains one small job after the other on the CPU and on the stand-in: ``python trainings.py JOBS FOLDER``.

``JOBS`` is a JSON file: a list of ``name``, ``sparse``, ``settings``, and ``like``, the job whose losses on the CPU it
must have. ``{folder}`` in settings is ``FOLDER``, and files that ``_write_files`` makes are there. Each line that is
printed is the answer about one.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import stand_in_gpu
import torch
from gpu_steps.small_run import train
from gpu_steps.step import Setting

from forge_core.cli import main as forge
from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.train.trainer import Trainer
from forge_plugins_data.preference_reference import write_reference
from forge_plugins_vlm.tasks.shapes import write_shapes


def main(jobs: Path, folder: Path) -> None:
    devices = {}
    for kind in ("cpu", "cuda"):
        devices[kind] = Setting(device=torch.device(kind), tiny=True, folder=folder / kind)
        devices[kind].folder.mkdir(parents=True)
    on_cpu: dict[str, list[float]] = {}
    _write_files(folder)
    for job in json.loads(jobs.read_text().replace("{folder}", str(folder))):
        if any("activations" in setting for setting in job["settings"]) and not (folder / "activations").exists():
            _extract(folder)
        name, settings = job["name"], [*job["settings"], "train.steps=3"]
        if job["like"] == name:
            on_cpu[name] = [*train(devices["cpu"], name, *settings, sparse=job["sparse"]).losses]
        losses = train(devices["cuda"], name, *settings, sparse=job["sparse"]).losses
        answer = {"name": name, "cpu": on_cpu[job["like"]], "gpu": [*losses], "waits": _waits(devices["cuda"], job)}
        print(json.dumps(answer), flush=True)


def _write_files(folder: Path) -> None:
    write_shapes(folder / "shapes", train=16, held_out=4, seed=0)
    answers = [{"prompt": f"{n} + 1 = ", "chosen": str(n + 1), "rejected": str(n)} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in answers))
    build = ComponentBuilder(discover())
    use = build.resolve("data_source", {"name": "preference_pairs", "path": str(folder / "pairs.jsonl")})
    source = build(use, seq_len=64, split="all", seed=0, samples_per_step=1, phases=())
    near = np.array([[-6.2 * one.sum() for one in pair.learned] for pair in source.pairs])  # a model that knows nothing
    keys = [pair.key for pair in source.pairs]
    write_reference(folder / "reference.npz", keys, near, source.tokenizer.fingerprint)
    completions = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in answers]
    (folder / "completions.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in completions))


def _extract(folder: Path) -> None:
    """Write what the first job has learned, on the CPU, computes."""
    command = ["extract", str(folder / "cpu/plain"), "--sites", "blocks.*.resid_post", "--samples", "8"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert forge([*command, "--out", str(folder / "activations"), "data.validation=0.1"]) == 0


def _waits(device: Setting, job: dict[str, Any]) -> Counter[str]:
    """Of steps 4 and 5 of six, of which the first and the last are logged."""
    before_step: list[Counter[str]] = []
    train_step = Trainer._train_step

    def noted(trainer: Trainer, microbatches: Any) -> bool:
        before_step.append(Counter(waits))
        return train_step(trainer, microbatches)

    unlogged = ("train.steps=6", "metrics.interval=1000")
    with stand_in_gpu.waits() as waits, patch.object(Trainer, "_train_step", noted):
        train(device, f"{job['name']}-unlogged", *job["settings"], *unlogged, sparse=job["sparse"])
    assert len(before_step) == 6
    return before_step[5] - before_step[3]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
