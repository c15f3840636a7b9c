"""Twenty straight steps against ten, a resume, and ten more: how many tensors and how many loss lines differ.

Usage: ``python benchmarks/resume.py``. Every run is a process of its own; the answer must be 0 everywhere.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from forge_core.checkpoint.store import open_checkpoint

JOB = """
[model]
name = "transformer"
dim = 64
n_layers = 2
n_heads = 4
[data]
name = "text_files"
path = "{stdlib}"
pattern = "*.py"
[train]
seq_len = 64
steps = 20
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[scheduler]
name = "cosine"
decay_steps = 20
[metrics]
interval = 1
"""
DATA = {
    "shuffled": ["train.batch_size=4"],
    "packed": ["train.batch_size=4", "data.document_mask=true"],
    "accumulated": ["train.batch_size=2", "train.grad_accumulation=2"],
}


def run(folder: Path, name: str, steps: int, settings: list[str]) -> Path:
    command = [sys.executable, "-m", "forge_core", "run", str(folder / "job.toml"), f"run.name={name}"]
    subprocess.run(
        [*command, f"run.dir={folder}", f"train.steps={steps}", *settings],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return folder / name


def differing(straight: Path, resumed: Path) -> tuple[int, int, int]:
    """Tensors in all, tensors that differ, and loss lines that differ."""
    sides = []
    for path in (straight, resumed):
        checkpoint = open_checkpoint(path / "checkpoints" / "step_00000020")
        entries = checkpoint.saved_tensors()
        tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
        checkpoint.load(tensors)
        sides.append(tensors)
    one, other = sides
    assert one.keys() == other.keys()
    lines = [[json.loads(line) for line in (p / "metrics.jsonl").read_text().splitlines()] for p in (straight, resumed)]
    kept = [[(line["step"], line["loss"], line["grad_norm"]) for line in side] for side in lines]
    wrong = sum(a != b for a, b in itertools.zip_longest(*kept))
    return len(one), sum(not torch.equal(one[key], other[key]) for key in one), wrong


def main() -> None:
    print(f"{'data':12} {'workers':>7} {'ranks':>5} {'tensors':>8} {'differing':>9} {'loss lines differing':>21}")
    for data, workers, ranks in itertools.product(DATA, (0, 2), (1, 2)):
        with TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.toml").write_text(JOB)
            settings = [*DATA[data], f"data.workers={workers}", "--nproc", str(ranks)]
            straight = run(folder, "straight", 20, settings)
            run(folder, "halved", 10, settings)
            total, tensors, lines = differing(straight, run(folder, "halved", 20, settings))
        print(f"{data:12} {workers:7} {ranks:5} {total:8} {tensors:9} {lines:21}")


if __name__ == "__main__":
    main()
