"""How long training waits for a checkpoint: written in the background, against in the foreground, in the same run.

Usage: ``python benchmarks/checkpoint.py [--width 1024] [--rounds 5]``. Two ranks share a model through FSDP; what is
saved are its parameters and AdamW's state. Goal: in the background, training waits for at most 0.15 s and a tenth of a
step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.state_dict import model_tensors, named_parameters, optimizer_state
from forge_core.checkpoint.store import CheckpointStore
from forge_core.run.process import hard_exit

RANKS = 2
ROWS = 1024
"""Of the input of a step; they decide how long it takes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of 25 square layers; 1024 saves 300 MB")
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints of each way")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2: the first checkpoint in the background is not counted")
    with TemporaryDirectory() as folder:
        mp.spawn(measure, args=(Path(folder), arguments.width, arguments.rounds), nprocs=RANKS)


def measure(rank: int, folder: Path, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    store = CheckpointStore(folder / "checkpoints")
    step, snapshot = training(width)
    step()
    rows = []
    for background in (True, False):
        saver = Saver(store, torch.device("cpu"), background=background, timeout=600, may_commit=lambda: None)
        for number in range(rounds):
            before, started = timed(step), time.perf_counter()
            saver.save(snapshot(1 + number + 1000 * background))
            saver.wait_until_copied()
            waited = time.perf_counter() - started
            meanwhile = timed(step)
            saved = saver.finish()
            assert saved is not None
            assert saved.error is None, saved.error
            rows.append((background, number, before, waited, meanwhile, saved.seconds))
            if rank == 0:
                store.remove(store.steps()[:-1])
        saver.close()
    if rank == 0:
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in snapshot(0).tensors.values())
        report(rows, n_bytes)
    dist.destroy_process_group()
    hard_exit()


def training(width: int) -> tuple[Callable[[], object], Callable[[int], Snapshot]]:
    """A step of training, and what is saved of it."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(25)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    names = named_parameters([model])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(ROWS, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def snapshot(number: int) -> Snapshot:
        tensors, _ = optimizer_state(optimizer, names)
        return Snapshot(
            step=number,
            tokens=0,
            tensors={**model_tensors(names, [model]), **tensors},
            state={},
            mesh={"dp_shard": RANKS, "pp": 1},
            versions={},
            metrics={},
            write_more=lambda _: {},
        )

    return step, snapshot


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def report(rows: list[tuple[bool, int, float, float, float, float]], n_bytes: int) -> None:
    print(f"{n_bytes / 1e6:.0f} MB, {RANKS} ranks")
    columns = ("step [s]", "waited [s]", "of a step", "step meanwhile [s]", "whole save [s]")
    print(f"{'':12} " + " ".join(f"{column:>18}" for column in columns))
    for background, number, before, waited, meanwhile, seconds in rows:
        words = f"{'background' if background else 'foreground'} {number + 1}"
        values = (before, waited, waited / before, meanwhile, seconds)
        print(f"{words:12} " + " ".join(f"{value:18.3f}" for value in values))
    later = [row for row in rows if row[0] and row[1] > 0]  # the first one makes room for the copy
    waited = statistics.median(row[3] for row in later)
    step = statistics.median(row[2] for row in rows)
    print(f"in the background, after the first: {waited:.3f} s, {waited / step:.3f} of a step (goals 0.15 s and 0.1)")


if __name__ == "__main__":
    main()
