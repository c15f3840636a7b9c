"""What ``forge plan`` predicts for the peak memory of a rank, against what a real run takes from the C library.

Each job is built and trained for three steps, in several processes over gloo where its layout has several ranks.
Measured is what malloc has handed out, in all threads, beyond what it has between two steps; to that the tensors are
added that live on between steps. torch's profiler cannot say it over gloo: buffers of collectives are freed by gloo's
threads, of which it sees the allocations only. A frozen encoder keeps nothing for backward: where it is large, the peak
is in its forward. Needs Linux with glibc 2.33 or newer. Usage: ``python benchmarks/plan_memory.py``. Three minutes on
two cores.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.batch import Entry
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.job import load_job
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.passes.order import sort_passes
from forge_core.registry.discovery import discover
from forge_core.run.process import hard_exit
from forge_core.train.build import build_model, build_optimizer
from forge_core.train.gradients import Gradients, clip_gradients
from forge_plugins_plan.memory import bytes_of
from forge_plugins_plan.simulation import simulate

JOB = """
[model]
name = "transformer"
dim = 256
n_layers = 6
n_heads = 8
n_kv_heads = 4
max_seq_len = 512
vocab_size = 4096
[data]
name = "text_files"
path = "unused"
[train]
steps = 3
seq_len = 256
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""


@attrs.frozen
class Case:
    """A layout, as overrides of ``JOB``."""

    name: str
    ranks: int
    overrides: tuple[str, ...]


_LOOKING = "name='vision_language', max_seq_len=512, vocab_size=4096, connector={name='average_pool', window=4}"
_TILES = "size=[128, 128], patch=8, n_layers=4, n_heads=4"  # 256 features of each, of which 16 tokens are made
_IMAGES = "data={name='image_text', path='unused', token_grid=[4, 4], processor={name='square', size=128}}"  # 8 a row
_SMALL_ENCODER = (
    f"model={{{_LOOKING}, dim=256, n_layers=6, n_heads=8, encoder={{name='conv_vit', dim=64, {_TILES}}}}}",
    _IMAGES,
)
_LARGE_ENCODER = (
    f"model={{{_LOOKING}, dim=64, n_layers=2, n_heads=4, encoder={{name='conv_vit', dim=256, {_TILES}}}}}",
    _IMAGES,
)

CASES = (
    Case("one process, fp32", 1, ()),
    Case("chunked loss, two microbatches", 1, ("loss.name=chunked_cross_entropy", "train.grad_accumulation=2")),
    Case("bf16 (fsdp on one rank)", 1, ("train.precision=bf16",)),
    Case("tied, wide and shallow", 1, ("model.tie_embeddings=true", "model.dim=512", "model.n_layers=2")),
    Case("fsdp on two ranks", 2, ()),
    Case("hsdp on four ranks, bf16", 4, ("parallel.dp_replicate=2", "train.precision=bf16", "train.batch_size=2")),
    Case("tensor parallel on two ranks", 2, ("parallel.tp=2",)),
    Case("recomputed blocks, bf16", 1, ("parallel.passes.activation_checkpointing=true", "train.precision=bf16")),
    Case("two stages, four microbatches", 2, ("parallel.pp=2", "train.grad_accumulation=4")),
    Case("emulated float8, bf16", 1, ("parallel.passes.fp8={emulate = true, min_dim = 128}", "train.precision=bf16")),
    Case("two copies, two microbatches", 2, ("parallel.dp_replicate=2", "train.grad_accumulation=2")),
    Case("small encoder, frozen", 1, (*_SMALL_ENCODER, "model.freeze_encoder=true")),
    Case("large encoder, trained", 1, _LARGE_ENCODER),
    Case("large encoder, frozen", 1, (*_LARGE_ENCODER, "model.freeze_encoder=true")),
)


def predict(case: Case, config: Path) -> int:
    """Bytes, for rank 0."""
    catalog = discover()
    job = load_job(config, case.overrides, catalog=catalog, world_size=case.ranks)
    simulated = simulate(job, catalog, 4096, case.ranks, stage=0)
    if simulated.memory is None:
        raise SystemExit(f"{case.name}: cannot be simulated: {simulated.reason}")
    return simulated.memory.peak


def measure(case: Case, config: Path) -> int:
    """Bytes on rank 0; starts one process a rank."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--rank-of", str(config), *case.overrides]
    group = {"WORLD_SIZE": str(case.ranks)}
    ranks = [
        subprocess.Popen(command, env={**common, **group, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(case.ranks)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{case.name}: a rank has failed")
    return int(said[0].split()[-1])


def run_rank(config: Path, overrides: list[str]) -> None:
    """Train as one rank, and print the most memory at one time during the steps after the first, in bytes."""
    device = torch.device("cpu")
    join_process_group(device)
    catalog = discover()
    job = load_job(config, overrides, catalog=catalog, world_size=dist.get_world_size())
    build = ComponentBuilder(catalog)
    mesh = build_mesh(job, device)
    passes = sort_passes(job, catalog, mesh.world_size)
    entries = job.data.config.entries()
    model = build_model(PassContext(mesh, job, device, entries=entries), 4096, passes, build)
    optimizer = build_optimizer(job, model, build)
    parameters = list(model.parameters.values())
    peak = 0
    for step in range(job.train.steps):
        dist.barrier()
        gc.collect()
        before, allocator = in_use(), Allocator()
        with allocator:
            microbatches = [batch(job, entries) for _ in range(job.train.grad_accumulation or 1)]
            scale = torch.full((), 1 / 1024)
            LEDGER.start_step(scale)
            model.run(microbatches, scale)
            clip_gradients(optimizer, Gradients(model.parameters, mesh, device), job.train.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step > 0:  # the first one makes the optimizer's state
            peak = max(peak, allocator.peak - before)
    kept = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    buffers = [buffer for part in model.parts for buffer in part.buffers()]
    print(bytes_of([*parameters, *buffers, *kept]) + peak)
    dist.destroy_process_group()
    hard_exit()


def batch(job: Job, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """Random tokens. Of images, as many as a row may have, their tokens before the text."""
    shape = (job.train.batch_size, job.train.seq_len)
    made = {"tokens": torch.randint(4096, shape), "targets": torch.randint(4096, shape)}
    if "pixels" in entries:
        pixels = entries["pixels"].shape(*shape)
        made["pixels"] = torch.randint(256, pixels, dtype=torch.uint8)
        rows, columns = job.data.config.token_grid
        n_tiles = pixels[1]
        made["image_slots"] = torch.full(shape, -1)
        made["image_slots"][:, : n_tiles * rows * columns] = torch.arange(n_tiles * rows * columns)
        made["image_range"] = torch.zeros(*shape, 3, dtype=torch.int64)
        made["image_range"][..., 2] = n_tiles
    return made


class Allocator(TorchDispatchMode):
    """Asks after every operation how much memory is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, in_use())
        return result


def in_use() -> int:
    """Bytes that the C library has handed out in this process, to any thread, and not got back."""
    found = LIBC.mallinfo2()
    return found.uordblks + found.hblkhd


class MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks"),
            "hblkhd",  # bytes in mappings of their own, as large tensors are
            *("usmblks", "fsmblks"),
            "uordblks",  # bytes in use in arenas
            *("fordblks", "keepcost"),
        )
    ]


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = MallInfo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", help="A job of the table; may be repeated.")
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        run_rank(arguments.rank_of, arguments.overrides)
        return
    print(f"{'job':<34} {'predicted MiB':>14} {'measured MiB':>13} {'error':>7}")
    with TemporaryDirectory() as folder:
        config = Path(folder) / "job.toml"
        config.write_text(JOB)
        for case in (case for case in CASES if not arguments.only or case.name in arguments.only):
            predicted = predict(case, config)
            measured = measure(case, config)
            columns = f"{predicted / 2**20:>14.1f} {measured / 2**20:>13.1f}"
            print(f"{case.name:<34} {columns} {predicted / measured - 1:>+7.1%}", flush=True)


if __name__ == "__main__":
    main()
