"""A step of a plain decoder in this checkout and in another one, in alternation.

Options that are off must cost nothing. The other checkout is from before they were there, with a virtual environment of
its own in ``.venv``. Each round starts a process in both, which runs the bare loop of ``step_overhead.py`` there on the
CPU, and counts the processor's time: what else runs on the machine changes it less than the clock's.
Usage: ``python benchmarks/two_checkouts.py OTHER [--rounds 15] [--steps 60]``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
from pathlib import Path

ONE_RUN = """
import sys, time
from pathlib import Path
from tempfile import TemporaryDirectory
sys.path.insert(0, "benchmarks")
import torch, step_overhead
torch.manual_seed(0)
step_overhead.join_process_group(step_overhead.choose_device("cpu"))
time.perf_counter = time.process_time
with TemporaryDirectory() as folder:
    for shape in step_overhead.SHAPES.values():
        bench = step_overhead.Bench(Path(folder), {steps}, **shape)
        bench.bare()
        print(min(bench.bare() for _ in range(3)))
"""


def run(checkout: Path, steps: int) -> list[float]:
    """Processor seconds per step of each shape of ``step_overhead.py``, in a process of the checkout."""
    command = [checkout / ".venv/bin/python", "-W", "ignore", "-c", ONE_RUN.format(steps=steps)]
    printed = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in printed.splitlines()]


def main() -> None:
    """Print the median ratio of this checkout to the other one by shape, with the quartiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    here, other = Path(__file__).resolve().parents[1], arguments.other.resolve()
    pairs = []
    for n in range(arguments.rounds):
        order = (here, other) if n % 2 else (other, here)
        measured = {checkout: run(checkout, arguments.steps) for checkout in order}
        pairs.append(list(zip(measured[here], measured[other], strict=True)))
    for shape, of_shape in enumerate(zip(*pairs, strict=True)):
        low, middle, high = statistics.quantiles([mine / theirs for mine, theirs in of_shape], n=4)
        least = min(mine for mine, _ in of_shape) / min(theirs for _, theirs in of_shape)
        print(f"shape {shape}: {middle:.4f} ({low:.4f} to {high:.4f}), of the fastest runs {least:.4f}")


if __name__ == "__main__":
    main()
