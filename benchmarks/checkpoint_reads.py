"""How long two ranks take to read a checkpoint, and how many bytes, against torch's own reader in the same run.

Usage: ``python benchmarks/checkpoint_reads.py [--width 2048] [--rounds 5]``. Two ranks have saved square matrices and
vectors by rows, and read them in the same layout, by columns, and whole. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore
from forge_core.run.process import hard_exit

RANKS = 2
MATRICES, VECTORS = 12, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048, help=f"of {MATRICES} matrices; 2048 saves 200 MB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.spawn(measure, args=(Path(folder), arguments.width, arguments.rounds), nprocs=RANKS)


def measure(rank: int, folder: Path, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    matrices = {f"matrix{i}": torch.randn(width, width) for i in range(MATRICES)}
    vectors = {f"vector{i}": torch.randn(width) for i in range(VECTORS)}
    store = CheckpointStore(folder / "checkpoints")
    by_rows = {key: distribute_tensor(tensor, mesh, [Shard(0)]) for key, tensor in {**matrices, **vectors}.items()}
    save(store, by_rows)
    checkpoint = store.newest(print)
    assert checkpoint is not None
    path = checkpoint.path
    wanted: dict[str, Mapping[str, torch.Tensor]] = {
        "the same layout": by_rows,
        "by columns": {key: distribute_tensor(tensor, mesh, [Shard(1)]) for key, tensor in matrices.items()},
        "whole": {**matrices, **vectors},
        "vectors by rows": {key: by_rows[key] for key in vectors},
        "vectors whole": vectors,
    }
    for name, tensors in wanted.items():
        ours, theirs = [], []
        for _ in range(rounds + 1):
            ours.append(timed(lambda tensors=tensors: checkpoint.load(tensors)))
            theirs.append(timed(lambda tensors=tensors: load(dict(tensors), storage_reader=FileSystemReader(path))))
        if rank == 0:
            report(name, sum(held(tensor).nbytes for tensor in tensors.values()), ours[1:], theirs[1:])
    dist.destroy_process_group()
    hard_exit()


def save(store: CheckpointStore, tensors: Mapping[str, torch.Tensor]) -> None:
    saver = Saver(store, torch.device("cpu"), background=False, timeout=600, may_commit=lambda: None)
    saver.save(
        Snapshot(
            step=1,
            tokens=0,
            tensors=tensors,
            state={},
            mesh={"dp_shard": RANKS, "pp": 1},
            versions={},
            metrics={},
            write_more=lambda _: {},
        )
    )
    saved = saver.finish()
    assert saved is not None
    assert saved.error is None, saved.error
    saver.close()


def timed(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds until all ranks are done, and the bytes that this one has read."""
    dist.barrier()
    before, started = bytes_read(), time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started, bytes_read() - before


def bytes_read() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def report(name: str, needed: int, ours: list[tuple[float, int]], theirs: list[tuple[float, int]]) -> None:
    seconds = [statistics.median(second for second, _ in side) for side in (ours, theirs)]
    least = [min(second for second, _ in side) for side in (ours, theirs)]
    n_bytes = [side[-1][1] / needed for side in (ours, theirs)]
    print(
        f"{name:16} {needed / 1e6:7.1f} MB a rank: {n_bytes[0]:.3f} of it read, torch {n_bytes[1]:.3f}; "
        f"{seconds[0]:.3f} s, torch {seconds[1]:.3f} (ratio {seconds[0] / seconds[1]:.2f}, "
        f"of the fastest {least[0] / least[1]:.2f})"
    )


if __name__ == "__main__":
    main()
