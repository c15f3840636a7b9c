"""A step of Muon on ranks that hold rows of each matrix, over gloo, against one process that holds all of them.

    python benchmarks/muon_ranks.py [--ranks 4]

The matrices are those of 4 layers of width 256, as in ``optimizers.py``. In each round the ranks step together, then
only move matrices there and back, and then rank 0 steps alone while the others wait. Each rank has one thread; times
are medians over rounds, of the slowest rank. The processor's time is what a machine with a core for each rank and
nothing to wait for would take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.config import MuonConfig
from forge_plugins_optim.muon import Muon
from forge_plugins_optim.whole_matrices import map_whole
from forge_testing.several_ranks import on_ranks

LAYERS, DIM, ROUNDS = 4, 256, 15


class Rounds:
    """On each rank."""

    def run(self) -> Mapping[str, list[float]]:
        """Milliseconds on the clock and of the processor, by what is timed."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        matrices = _matrices()
        alone = _step(matrices)
        parts = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in matrices]
        together = _step(parts)
        moved = [part.bfloat16() for part in parts]
        is_first = dist.get_rank() == 0
        timed: Mapping[str, Callable[[], object]] = {
            "ranks": together,
            "exchange": lambda: map_whole(moved, lambda whole: whole),
            "alone": alone if is_first else lambda: None,
        }
        found: dict[str, list[list[float]]] = {name: [] for name in timed}
        for _ in range(ROUNDS + 1):
            for name, work in timed.items():
                found[name].append(_slowest(work))
        return {name: [statistics.median(one) for one in zip(*times[1:], strict=True)] for name, times in found.items()}


def _slowest(work: Callable[[], object]) -> list[float]:
    dist.barrier()
    before = time.perf_counter(), time.process_time()
    work()
    after = time.perf_counter(), time.process_time()
    spent = torch.tensor([(end - start) * 1e3 for start, end in zip(before, after, strict=True)])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.tolist()


def _matrices() -> list[torch.Tensor]:
    shapes = [*[(DIM, DIM)] * 4, (3 * DIM, DIM), (3 * DIM, DIM), (DIM, 3 * DIM)] * LAYERS
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _step(matrices: list[torch.Tensor]) -> Callable[[], object]:
    named = [NamedParameter(f"m{i}", nn.Parameter(matrix.clone()), "matrix") for i, matrix in enumerate(matrices)]
    for one in named:
        one.parameter.grad = one.parameter.detach().clone()
    return Muon(MuonConfig(lr=1e-3), parameters=named).step


def main() -> None:
    parser = argparse.ArgumentParser(description="Muon on ranks against one process")
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    times = on_ranks(Rounds, "run", ranks)[0]
    print(f"{LAYERS} layers of width {DIM}, torch {torch.__version__}, {ranks} ranks on {os.cpu_count()} cores")
    for index, name in enumerate(("clock", "processor")):
        one, all_, moving = (times[key][index] for key in ("alone", "ranks", "exchange"))
        print(
            f"{name}: one process {one:.1f} ms, {ranks} ranks {all_:.1f}, moving alone {moving:.1f}; {all_ / one:.2f}"
        )


if __name__ == "__main__":
    main()
