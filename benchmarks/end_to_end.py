"""Tokens a second, by default on the 20M debug shape, and where a step's time goes.

4 × 512 tokens a step, vocabulary 32,000, bf16 compute through FSDP2 on one rank, as ``forge run`` builds it. The whole
step is measured in the trainer; the split in the same parts called one by one, with the device waited for after each.
Usage: ``python benchmarks/end_to_end.py [--loss chunked_cross_entropy] [--steps 12] [--compile]``. Other shapes:
``[--dim 256] [--layers 4] [--vocab 32000] [--seq-len 512]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from step_overhead import Bench

from forge_core.distributed.mesh import choose_device, join_process_group
from forge_core.train.gradients import Gradients, clip_gradients

OVERRIDES = ["train.precision=bf16", "model.n_kv_heads=4"]
SHAPE = {"dim": 256, "layers": 4, "vocab": 32_000, "seq_len": 512}
PARTS = ("forward", "loss", "backward", "clip", "optimizer")


class Stopwatch:
    """Seconds by name; waits for the device around each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self.seconds[name].append(time.perf_counter() - started)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def split(bench: Bench, steps: int) -> dict[str, float]:
    """Median seconds of each part of a step."""
    model, optimizer, _, loss = bench.parts()
    watch = Stopwatch(bench.device)

    def timed_loss(*arguments):
        with watch.measure("loss"):
            return loss(*arguments)

    with bench.loader() as loader:
        for _, (batch,) in zip(range(steps), loader, strict=False):
            on_device = {name: tensor.to(bench.device) for name, tensor in batch.items()}
            with watch.measure("forward"):
                total, count, _ = model(**on_device, loss=timed_loss)
            watch.seconds["forward"][-1] -= watch.seconds["loss"][-1]
            with watch.measure("backward"):
                total.backward(1 / count)
            with watch.measure("clip"):
                gradients = Gradients(dict(model.named_parameters()), bench.mesh, bench.device)
                clip_gradients(optimizer, gradients, 1.0)
            with watch.measure("optimizer"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {name: statistics.median(watch.seconds[name][2:]) for name in PARTS}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--loss", default="cross_entropy")
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--compile", action="store_true")
    for name, size in SHAPE.items():
        arguments.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    options = arguments.parse_args()
    shape = {name: getattr(options, name) for name in SHAPE}
    join_process_group(choose_device("auto"))
    overrides = [*OVERRIDES, f"loss.name={options.loss}"]
    if options.compile:
        overrides.append("parallel.passes.compile=true")
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.steps, overrides=overrides, **shape)
        parts = split(bench, options.steps)
        seconds = bench.forge()
    dist.destroy_process_group()
    tokens = 4 * options.seq_len
    print(f"{options.loss}, {bench.device.type}: {seconds:.3f} s a step, {tokens / seconds:,.0f} tokens/s")
    for name in PARTS:
        print(f"  {name:10} {parts[name] * 1e3:9.2f} ms  {parts[name] / sum(parts.values()):6.1%}")


if __name__ == "__main__":
    main()
