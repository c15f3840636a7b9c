"""What the callbacks that watch a run add to its steps, each alone and all of them, at their defaults.

    python benchmarks/callbacks.py [--steps 200] [--rounds 7] [--tokens 4096] [--only ema]

Two runs in one process, one with them and one without, do their steps in turn; the ratios are medians over rounds, and
those of the row ``none``, which has no callback in either, say how much noise there is. At most 1.01 is wanted for all.
``--steps`` steps are measured from the eleventh on: 200 have each interval as often as a long run.
``profile`` and ``memory_snapshot`` record a few steps of a run, and are not here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import torch
import torch.distributed as dist
from step_overhead import Bench

from forge_core.distributed.mesh import choose_device, join_process_group
from forge_core.train.trainer import Trainer

NAMES = ("activation_norms", "curve_extrapolation", "ema", "health", "layer_norms")
_BEFORE = 10
"""Steps that are not measured: the first is logged, and slow."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512, help="of a step, a multiple of 128")
    parser.add_argument("--only", choices=["none", *NAMES, "all"], action="append", help="may be repeated")
    options = parser.parse_args()
    join_process_group(choose_device("auto"))
    shape = {"dim": options.dim, "layers": 4, "vocab": 1000, "seq_len": 128}
    variants = {"none": (), **{name: (name,) for name in NAMES}, "all": NAMES}
    variants = {name: names for name, names in variants.items() if not options.only or name in options.only}
    rounds: dict[str, list[tuple[Seconds, Seconds]]] = {name: [] for name in variants}
    with TemporaryDirectory() as folder:
        size = f"train.batch_size={options.tokens // shape['seq_len']}"
        bench = Bench(Path(folder), _BEFORE + options.steps + 1, overrides=[size], **shape)
        for _ in range(options.rounds):
            for name, names in variants.items():
                rounds[name].append(measured(bench, names))
    print(f"dim {options.dim}, 4 layers, {options.tokens} tokens; {options.steps} steps, median of {options.rounds}\n")
    print(f"{'callback':22}{'without ms':>11}{'with ms':>9}{'ratio':>8}{'of the processor':>18}")
    for name, pairs in rounds.items():
        without, with_them = (statistics.median(one.clock for one in column) for column in zip(*pairs, strict=True))
        clock = statistics.median(b.clock / a.clock for a, b in pairs)
        processor = statistics.median(b.processor / a.processor for a, b in pairs)
        print(f"{name:22}{without * 1e3:11.3f}{with_them * 1e3:9.3f}{clock:8.3f}{processor:18.3f}")
    dist.destroy_process_group()


@attrs.frozen
class Seconds:
    """Of a step, on the clock and of the processor in all threads."""

    clock: float
    processor: float


def measured(bench: Bench, names: Sequence[str]) -> tuple[Seconds, Seconds]:
    """A run without callbacks and one with them."""
    callbacks = {name: bench.build(bench.build.resolve("callback", {"name": name})) for name in names}
    runs = [bench.trainer(), bench.trainer([*callbacks.items()])]
    if "curve_extrapolation" in callbacks:  # it fits nothing before the run is a few hundred steps old
        for step in range(110, 100_000, 10):
            callbacks["curve_extrapolation"].step_logged(runs[1].run.context, step, {"loss": 1.7 + 8 * step**-0.35})
    times: tuple[list[Seconds], list[Seconds]] = ([], [])
    for trainer in runs:
        trainer.run.emit("run_start")
        trainer.metrics.restart()
    for step in range(bench.steps - 1):
        # whoever comes second finds the processor's caches full of the other's
        for which in (0, 1) if step % 2 else (1, 0):
            times[which].append(timed_step(bench, runs[which]))
    for trainer in runs:
        trainer.run.loader.close()
    return tuple(
        Seconds(
            statistics.fmean(one.clock for one in own[_BEFORE:]),
            statistics.fmean(one.processor for one in own[_BEFORE:]),
        )
        for own in times
    )


def timed_step(bench: Bench, trainer: Trainer) -> Seconds:
    microbatches = next(trainer.run.loader)
    clock, processor = time.perf_counter(), time.process_time()
    trainer.step += 1
    trainer._train_step(microbatches)
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    return Seconds(time.perf_counter() - clock, time.process_time() - processor)


if __name__ == "__main__":
    main()
