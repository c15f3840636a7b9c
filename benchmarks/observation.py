"""What looking into a model costs: a training step with ``capture``, and attention that is computed explicitly.

    python benchmarks/observation.py [--steps 60] [--rounds 5] [--dim 128] [--positions 1024]

Ratios of medians, in one process, in turn. Wanted: at most 1.05 over steps of which every tenth writes all residual
streams to disk, at most 1.5 for such a step alone, at most 3 for explicit attention. With nothing observed a step has
no hook, and so no cost to measure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from callbacks import timed_step
from step_overhead import Bench

from forge_core.distributed.mesh import choose_device, join_process_group
from forge_plugins_dense.attention import AttentionCore
from forge_plugins_dense.attention_sites import pattern

_BEFORE = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--positions", type=int, default=1024)
    options = parser.parse_args()
    join_process_group(choose_device("auto"))
    shape = {"dim": options.dim, "layers": 4, "vocab": 1000, "seq_len": 128}
    print(f"dim {options.dim}, 4 layers, 4 × 128 tokens; {options.steps} steps; {options.rounds} rounds")
    for interval, name in ((10, "capture, every tenth step"), (1, "capture, every step")):
        ratios = []
        for _ in range(options.rounds):
            with TemporaryDirectory() as folder, chdir(folder):  # where captures go
                ratios.append(captured(Bench(Path(folder), _BEFORE + options.steps + 1, **shape), interval))
        print(f"{name:28} {statistics.median(ratios):.3f} of a step without")
    ratio = attention(options.positions, options.rounds)
    print(f"explicit attention, {options.positions} positions: {ratio:.2f} of the kernel")
    dist.destroy_process_group()


def captured(bench: Bench, interval: int) -> float:
    """Seconds of steps with the callback over those without it."""
    use = bench.build.resolve("callback", {"name": "capture", "interval": interval})
    runs = [bench.trainer(), bench.trainer([("capture", bench.build(use))])]
    for trainer in runs:
        trainer.run.emit("run_start")
        trainer.metrics.restart()
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(bench.steps - 1):
        for which in (0, 1) if step % 2 else (1, 0):
            times[which].append(timed_step(bench, runs[which]).clock)
    for trainer in runs:
        trainer.run.emit("run_end", step=trainer.step, stopped="")
        trainer.run.loader.close()
    without, with_it = (statistics.fmean(own[_BEFORE:]) for own in times)
    return with_it / without


def attention(positions: int, rounds: int) -> float:
    """Scores, softmax and product by themselves, over the kernel."""
    core = AttentionCore("auto")
    q, k, v = (torch.randn(2, 8, positions, 64) for _ in range(3))
    explicit = best(lambda: pattern(core, q, k, v, None, True) @ v, rounds)
    return explicit / best(lambda: core(q, k, v, None, True), rounds)


@torch.no_grad()
def best(work: Callable[[], object], rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
