"""What the callbacks that watch a run add to its steps, each alone and all of them, at their defaults.

    python benchmarks/callbacks.py [--steps 200] [--rounds 7]

The same run with and without them, in one process, in alternation; the ratios are medians over pairs. At most 1.01 is
wanted for all. ``--steps`` steps are measured from the eleventh on: 200 have each interval as often as a long run.
``profile`` and ``memory_snapshot`` record a few steps of a run, and are not here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from step_overhead import Bench

from forge_core.contracts.callback import Callback
from forge_core.contracts.component_ref import ComponentRef
from forge_core.distributed.mesh import choose_device, join_process_group

NAMES = ("activation_norms", "curve_extrapolation", "health", "layer_norms")
_BEFORE = 10
"""Steps that are not measured: the first is logged, and slow."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    join_process_group(choose_device("auto"))
    shape = {"dim": options.dim, "layers": 4, "vocab": 1000, "seq_len": 128}
    variants = {**{name: (name,) for name in NAMES}, "all": NAMES}
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder), _BEFORE + options.steps + 2, **shape)
        measured(bench, ())
        pairs = {name: [] for name in variants}
        for _ in range(options.rounds):
            for name, names in variants.items():
                pairs[name].append((measured(bench, ()), measured(bench, names)))
    print(f"dim {options.dim}, 4 layers, 4 × 128 tokens; {options.steps} steps; median of {options.rounds} pairs\n")
    print(f"{'callback':22}{'without ms':>11}{'with ms':>9}{'ratio':>8}{'of the processor':>18}")
    for name, times in pairs.items():
        without, with_them = (statistics.median(one[0] for one in column) for column in zip(*times, strict=True))
        ratios = [statistics.median(b[i] / a[i] for a, b in times) for i in range(2)]
        print(f"{name:22}{without * 1e3:11.3f}{with_them * 1e3:9.3f}{ratios[0]:8.3f}{ratios[1]:18.3f}")
    dist.destroy_process_group()


def measured(bench: Bench, names: Sequence[str]) -> tuple[float, float]:
    """Seconds a step on the clock, and of the processor in all threads."""
    trainer = bench.trainer([(name, make(bench, name)) for name in names])
    times: list[tuple[float, float]] = []
    step = trainer._train_step

    def timed(microbatches) -> bool:
        if len(times) in (_BEFORE, bench.steps - 2) and bench.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter(), time.process_time()))
        return step(microbatches)

    trainer._train_step = timed
    trainer.train(save_first=False)
    trainer.loader.close()
    first, last = times[_BEFORE], times[bench.steps - 2]
    return tuple((b - a) / (bench.steps - 2 - _BEFORE) for a, b in zip(first, last, strict=True))


def make(bench: Bench, name: str) -> Callback:
    use: ComponentRef = bench.build.resolve("callback", {"name": name})
    callback: Callback = bench.build(use)
    if name == "curve_extrapolation":  # it fits nothing before the run is a few hundred steps old
        for step in range(110, 100_000, 10):
            callback.step_logged(step, {"loss": 1.7 + 8 * step**-0.35})
    return callback


if __name__ == "__main__":
    main()
