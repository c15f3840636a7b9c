"""Whether ``forge plan`` predicts what a step takes: ten jobs on this CPU, each planned and run.

The machine is measured first (``forge plan --calibrate``), for one rank and for two. Shown are the fastest step of
each run, the median, and both as multiples of the prediction. Allowed of the median: 0.85 to 1.15. What else the
machine does changes both, and not always alike: the load is printed.

Threads: one per rank, unless ``OMP_NUM_THREADS`` says otherwise.

Usage: ``python benchmarks/plan_time.py [--only NAME] [--steps N] [--calibrations FOLDER]``. Ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

JOB = """
[model]
name = "transformer"
dim = 256
n_layers = 4
n_heads = 4
max_seq_len = 1024
[data]
name = "text_files"
path = "{stdlib}"
pattern = "[a-e]*.py"
tokenizer = "bytes"
[train]
steps = 12
seq_len = 256
batch_size = 8
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[checkpoint]
interval = 0
[metrics]
interval = 1
"""
JOBS = {
    "dim 256, 4 layers": [],
    "dim 512, 2 layers": ["model.dim=512", "model.n_layers=2", "train.batch_size=4"],
    "dim 128, 8 layers": ["model.dim=128", "model.n_layers=8"],
    "sequences of 1024": ["train.seq_len=1024", "train.batch_size=2"],
    "bf16": ["train.precision=bf16"],
    "all recomputed": ["parallel.passes.activation_checkpointing.mode=full"],
    "four microbatches": ["train.batch_size=4", "train.grad_accumulation=4"],
    "sparse, 8 experts": ["model.num_experts=8", "model.moe.hidden_dim=256"],
    "fsdp on two ranks": ["parallel.dp_shard=2"],
    "tp on two ranks": ["parallel.tp=2"],
}
RANKS = {"fsdp on two ranks": 2, "tp on two ranks": 2}


def forge(*words: str, folder: Path) -> str:
    """What a command prints."""
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-P", "-m", "forge_core", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, **threads})
    if done.returncode:
        raise SystemExit(f"forge {' '.join(words)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def planned(config: Path, overrides: list[str], ranks: int, calibration: Path) -> float:
    """Seconds."""
    words = ["--world-size", str(ranks), "--calibration", str(calibration), "--json"]
    table = json.loads(forge("plan", str(config), *words, *overrides, folder=config.parent))
    return float(table["time"]["seconds"])


def measured(config: Path, overrides: list[str], ranks: int, steps: int, name: str) -> list[float]:
    """Seconds of each step but the first three."""
    given = [f"run.name={name}", f"train.steps={steps}", *overrides]
    forge("run", str(config), "--nproc", str(ranks), *given, folder=config.parent)
    lines = (config.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line).get("step_seconds") for line in lines]
    return [seconds for seconds in found if seconds is not None][3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=JOBS, help="may be repeated")
    parser.add_argument("--steps", type=int, default=12, help="of a run; more than 4")
    parser.add_argument("--calibrations", type=Path, help="where calibrations of earlier are, or are kept")
    arguments = parser.parse_args()
    names = arguments.only or list(JOBS)
    with TemporaryDirectory() as name:
        folder = Path(name)
        kept = (arguments.calibrations or folder).resolve()
        config = folder / "job.toml"
        config.write_text(JOB)
        for ranks in {RANKS.get(one, 1) for one in names}:
            file = kept / f"{ranks}.json"
            if not file.exists():
                measures = ["--world-size", str(ranks), "--calibrate", "--out", str(file)]
                forge("plan", str(config), *measures, folder=folder)
        print(f"{'job':<20} {'planned, s':>10} {'fastest':>8} {'median':>8} {'ratios':>12} {'load':>6}")
        ratios = []
        for number, one in enumerate(names):
            ranks = RANKS.get(one, 1)
            seconds = planned(config, JOBS[one], ranks, kept / f"{ranks}.json")
            steps = measured(config, JOBS[one], ranks, arguments.steps, f"job-{number}")
            least, middle = min(steps), statistics.median(steps)
            ratios.append(middle / seconds)
            figures = f"{seconds:>10.3f} {least:>8.3f} {middle:>8.3f} {least / seconds:>6.2f}{middle / seconds:>6.2f}"
            print(f"{one:<20} {figures} {os.getloadavg()[0]:>6.1f}", flush=True)
        within = sum(0.85 <= ratio <= 1.15 for ratio in ratios)
        print(f"within 15 %: {within} of {len(ratios)} by the median step")


if __name__ == "__main__":
    main()
