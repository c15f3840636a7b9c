"""How long ``forge report`` takes, in a process of its own, and how large the page is.

    python benchmarks/report.py

By default 10 runs of 10,000 logged steps of 14 metrics. At most 3 s and 3 MB are wanted.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.runs):
            write_run(folder / f"run{number}", options.lines, number)
        page = folder / "report.html"
        times = [timed(folder, page) for _ in range(options.rounds)]
        megabytes = page.stat().st_size / 1e6
    print(f"{options.runs} runs of {options.lines:,} lines; median of {options.rounds}\n")
    for row, seconds in zip(("wall clock", "processor"), zip(*times, strict=True), strict=True):
        print(f"{row:12}{statistics.median(seconds):8.2f} s   (least {min(seconds):.2f})")
    print(f"{'page':12}{megabytes:8.2f} MB")


def write_run(folder: Path, n_lines: int, seed: int) -> None:
    dice = random.Random(seed)
    folder.mkdir()
    (folder / "job.toml").write_text(f"[train]\nsteps = {n_lines}\nseed = {seed}\n")
    names = ("loss", "loss/a", "loss/b", "grad_norm", "lr", "tokens_per_second", "step_seconds", "data_seconds", "mfu")
    names += ("memory_gib", "auxiliary/balance", "auxiliary/z")
    lines = []
    for step in range(1, n_lines + 1):
        values = {"step": step, **{name: dice.gauss(3, 0.1) for name in names}, "tokens": step * 524_288, "skipped": 0}
        lines.append(json.dumps(values))
        if step % 100 == 0:
            lines.append(json.dumps({"step": step, "eval/loss": dice.gauss(3, 0.1)}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    saved = [{"time": "2026-01-01T00:00:00+00:00", "event": "saved", "step": step} for step in range(0, n_lines, 500)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in saved))


def timed(folder: Path, page: Path) -> tuple[float, float]:
    """Seconds on the clock, and of the processor."""
    command = [sys.executable, "-m", "forge_core", "report", str(folder), "--out", str(page)]
    before, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - before, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


if __name__ == "__main__":
    main()
