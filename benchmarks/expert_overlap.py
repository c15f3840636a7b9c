"""What ``overlap`` and ``chunks`` of ``expert_parallel`` are worth on a slow link: a sparse layer on two ranks.

The ranks are two processes in network namespaces, with a link between them that the kernel keeps at ``--mbit`` (tbf).
Each setting does a forward and a backward in turn, so that all of them meet the same load of the machine; the least and
the median of ``--rounds`` are told. Needs Linux, root, ``ip`` and ``tc``. Usage: ``python
benchmarks/expert_overlap.py``. Half a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.run.process import hard_exit
from forge_core.train.initialisation import SeededInitializer

DIM, HIDDEN, EXPERTS, TOKENS = 256, 512, 8, 1024
SETTINGS = {"waits": None, "overlap": 1, "overlap, chunks = 2": 2, "overlap, chunks = 4": 4}
"""By what the layer's ``Experts.chunks`` is."""
RANKS = 2
_NAMES = [f"forgeov{os.getpid()}{letter}" for letter in "ab"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=int, default=300, help="of the link")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dispatcher", default="all_to_all", choices=["all_to_all", "hierarchical"])
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.rounds, options.dispatcher)
        return
    with slow_link(options.mbit):
        ranks = [start(rank) for rank in range(RANKS)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit("a rank has failed")


@contextmanager
def slow_link(mbit: int) -> Iterator[None]:
    """Two namespaces, each the other's only neighbour."""
    try:
        for name in _NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "v0", "netns", _NAMES[0], "type", "veth", "peer", "name", "v0", "netns", _NAMES[1])
        for rank, name in enumerate(_NAMES):
            run("ip", "-n", name, "addr", "add", f"10.88.0.{rank + 1}/24", "dev", "v0")
            for device in ("lo", "v0"):
                run("ip", "-n", name, "link", "set", device, "up")
            limit = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "v0", "root", "tbf", *limit)
        yield
    finally:
        for name in _NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def start(rank: int) -> subprocess.Popen[bytes]:
    facts = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29400"}
    environment = {**os.environ, **facts, "GLOO_SOCKET_IFNAME": "v0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["ip", "netns", "exec", _NAMES[rank], sys.executable, *sys.argv], env=environment)


def measure(rounds: int, dispatcher: str) -> None:
    dist.init_process_group("gloo")
    layer = build_layer(dispatcher)
    seconds = {name: [] for name in SETTINGS}
    for _ in range(rounds + 1):
        for name, chunks in SETTINGS.items():
            layer.experts.chunks = chunks
            hidden = torch.randn(1, TOKENS, DIM, requires_grad=True)
            dist.barrier()
            begin = time.perf_counter()
            layer(hidden).square().mean().backward()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(f"{'':<22} {'least':>18} {'median':>18}")
        for name, times in seconds.items():
            columns = []
            for statistic in (min, statistics.median):
                value, waiting = statistic(times[1:]), statistic(seconds["waits"][1:])
                columns.append(f"{1000 * value:8.0f} ms ({value / waiting:.2f})")
            print(f"{name:<22} {columns[0]:>18} {columns[1]:>18}")
    dist.destroy_process_group()
    hard_exit()


def build_layer(dispatcher: str) -> torch.nn.Module:
    """This rank's part of it."""
    build = ComponentBuilder(discover())
    table = {"name": "moe", "n_experts": EXPERTS, "hidden_dim": HIDDEN, "shared_experts": 4}
    use = build.resolve("feed_forward", {**table, "router": {"name": "softmax_topk", "top_k": 2, "balance": 0.0}})
    layer = build(use, dim=DIM, layer=0, n_layers=1)
    layer.init_weights(SeededInitializer(0), "", 0.02, 0.02)
    keys = {"ranks_per_node": 1} if dispatcher == "hierarchical" else {}
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    layer.experts.dispatcher = build(
        build.resolve("dispatcher", {"name": dispatcher, **keys}), n_experts=EXPERTS, mesh=mesh
    )
    own = EXPERTS // RANKS
    for name, parameter in list(layer.experts.named_parameters()):
        part = parameter.detach()[dist.get_rank() * own :][:own].clone()
        setattr(layer.experts, name, torch.nn.Parameter(part))
    return layer


if __name__ == "__main__":
    main()
