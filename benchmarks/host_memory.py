"""What a checkpoint in the memory of two nodes takes, against one on the disk, in the same run.

    python benchmarks/host_memory.py [--width 1024] [--rounds 5] [--memory /dev/shm]

Two ranks share a model through FSDP, and each is a node: it writes its part into a folder of its own below ``--memory``
and sends a copy to the other. Compared are what training waits for a save, how long it takes until the checkpoint is
whole, and a restore: with the memory of both nodes, and with that of one wiped. Bandwidths are of one rank's part. The
disk is that of the temporary directory, read from the page cache; both ranks are on this machine, so that copies go
over the loopback.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint import RANKS, timed, training

from forge_core.checkpoint.saver import Saver
from forge_core.checkpoint.store import CheckpointStore, open_checkpoint
from forge_core.run.process import hard_exit
from forge_plugins_mirror.host_memory import search
from forge_plugins_mirror.host_memory.history import History
from forge_plugins_mirror.host_memory.keeper import Keeper
from forge_plugins_mirror.host_memory.node import NodeFolder, find_nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of 25 square layers; 1024 saves 315 MB")
    parser.add_argument("--rounds", type=int, default=5, help="of each")
    parser.add_argument("--memory", default="/dev/shm", help="a folder in memory")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(
            "--rounds must be at least 2: the first save of each way makes room for the copy, and is not counted"
        )
    with TemporaryDirectory() as folder, TemporaryDirectory(dir=arguments.memory) as memory:
        mp.spawn(measure, args=(Path(folder), Path(memory), arguments.width, arguments.rounds), nprocs=RANKS)


def measure(rank: int, folder: Path, memory: Path, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    os.environ["BENCHMARK_NODE"] = str(memory / f"node{rank}")
    Path(os.environ["BENCHMARK_NODE"]).mkdir()
    (folder / "run").mkdir(exist_ok=True)
    # what is saved here is no whole run, which is all that these look at
    search.resume_problem = lambda path: None  # type: ignore[assignment]
    step, snapshot = training(width)
    step()
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in snapshot(0).tensors.values()) / RANKS
    times: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.setdefault(what, []).append(slowest.item())

    store = CheckpointStore(folder / "checkpoints")
    saver = Saver(store, torch.device("cpu"), background=True, timeout=600, may_commit=lambda: None)
    history = [History.new(folder / "run").going_on_from(-1, "benchmark")]
    dist.broadcast_object_list(history, src=0)
    node = NodeFolder("$BENCHMARK_NODE", history[0].folder)
    nodes = find_nodes(node)
    keeper = Keeper(node, nodes, history[0], 600, lambda: None)
    for number in range(1, rounds + 1):
        note("a step", timed(step))
        dist.barrier()
        started = time.perf_counter()
        saver.save(snapshot(number))
        note("disk: training waits", time.perf_counter() - started)
        saved = saver.finish()
        assert saved is not None
        assert saved.error is None, saved.error
        note("disk: whole", saved.seconds)
        dist.barrier()
        started = time.perf_counter()
        keeper.keep(snapshot(number))
        note("memory: training waits", time.perf_counter() - started)
        keeper.wait()
        (kept,) = keeper.outcomes()
        assert kept.error is None, kept.error
        note("memory: whole", kept.seconds)
        if rank == 0:
            store.remove(store.steps()[:-1])
    saver.close()
    keeper.close()

    def from_disk() -> None:
        open_checkpoint(store.folder(rounds)).load(snapshot(0).tensors)

    def from_memory() -> None:
        found = search.Search(node, nodes, history[0], print).newest()
        assert found is not None
        found.load(snapshot(0).tensors)

    for _ in range(rounds):
        for what, restore in (("disk: restore", from_disk), ("memory: restore", from_memory)):
            dist.barrier()
            note(what, timed(restore))
        if rank == 1:
            node.remove()
            node.make()
        dist.barrier()
        note("memory: restore, a node wiped", timed(from_memory))
    if rank == 0:
        report(times, n_bytes)
    dist.destroy_process_group()
    hard_exit()


def report(times: dict[str, list[float]], n_bytes: float) -> None:
    print(f"{RANKS} ranks of {n_bytes / 1e6:.0f} MB each, a node each; medians without the first round")
    middle = {what: statistics.median(seconds[1:]) for what, seconds in times.items()}
    for what, seconds in middle.items():
        print(f"{what:32} {seconds:8.3f} s  {n_bytes / seconds / 1e9:7.3f} GB/s")
    for what in ("training waits", "whole", "restore", "restore, a node wiped"):
        disk = middle[f"disk: {what.partition(',')[0]}"]
        print(f"{what}: {middle[f'memory: {what}'] / disk:.2f} times that of the disk")


if __name__ == "__main__":
    main()
