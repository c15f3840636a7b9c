"""What ``forge plan`` predicts for the peak memory of a rank, against what torch's CPU allocator hands out.

Each job is built and trained for real for three steps (in several processes over gloo where its layout has several
ranks), while torch's profiler records every allocation, those inside kernels and gloo included; the column ``tensors``
leaves these out, as the prediction does. Usage: ``python benchmarks/plan_memory.py``. Three minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from forge_core.auxiliary import LEDGER
from forge_core.builder import ComponentBuilder
from forge_core.config.job import load_job
from forge_core.discovery import discover
from forge_core.engine.build import build_model, build_optimizer
from forge_core.engine.gradients import clip_gradients, global_norm
from forge_core.engine.mesh import build_mesh, join_process_group
from forge_core.passes import sort_passes
from forge_core.plan.memory import MemoryLedger
from forge_core.plan.simulation import simulate

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
    Case("two copies, two microbatches", 2, ("parallel.dp_replicate=2", "train.grad_accumulation=2")),
)


def predict(case: Case, config: Path) -> int:
    """Bytes, for the first rank."""
    catalog = discover()
    job = load_job(config, case.overrides, catalog=catalog, world_size=case.ranks)
    simulated = simulate(job, catalog, 4096, case.ranks, stage=0)
    if simulated.memory is None:
        raise SystemExit(f"{case.name}: cannot be simulated: {simulated.reason}")
    return simulated.memory.peak


def measure(case: Case, config: Path) -> tuple[int, int]:
    """Bytes on the first rank, of the allocator and of tensors alone; starts one process a rank."""
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
    allocator, tensors = said[0].split()[-2:]
    return int(allocator), int(tensors)


def run_rank(config: Path, overrides: list[str]) -> None:
    """Train as one rank, and print the most memory at one time during the steps: the allocator's, and tensors'."""
    device = torch.device("cpu")
    join_process_group(device)
    catalog = discover()
    job = load_job(config, overrides, catalog=catalog, world_size=dist.get_world_size())
    steps, peak = job.train.steps, 0
    ledger = MemoryLedger()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, ledger:
        build = ComponentBuilder(catalog)
        mesh = build_mesh(job, device)
        model = build_model(job, 4096, mesh, device, sort_passes(job, catalog), build)
        optimizer = build_optimizer(job, model, build)
        parameters = list(model.parameters.values())
        ledger.restart()
        for step in range(steps):
            with torch.profiler.record_function(f"step {step}"):
                shape = (job.train.batch_size, job.train.seq_len)
                microbatches = [
                    {"tokens": torch.randint(4096, shape), "targets": torch.randint(4096, shape)}
                    for _ in range(job.train.grad_accumulation or 1)
                ]
                scale = torch.full((), 1 / 1024)
                LEDGER.start_step(scale)
                model.executor.run(microbatches, scale)
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                clip_gradients(gradients, global_norm(gradients, mesh), job.train.clip_norm)
                del gradients
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == "step 0")
    held = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held) if event.start_ns() >= start else 0
    print(peak, ledger.peak)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", help="A job of the table; may be repeated.")
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        run_rank(arguments.rank_of, arguments.overrides)
        return
    print(f"{'job':<34} {'tensors MiB':>12} {'predicted MiB':>14} {'measured MiB':>13} {'error':>7}")
    with TemporaryDirectory() as folder:
        config = Path(folder) / "job.toml"
        config.write_text(JOB)
        for case in (case for case in CASES if not arguments.only or case.name in arguments.only):
            predicted = predict(case, config)
            measured, tensors = measure(case, config)
            columns = f"{tensors / 2**20:>12.1f} {predicted / 2**20:>14.1f} {measured / 2**20:>13.1f}"
            print(f"{case.name:<34} {columns} {predicted / measured - 1:>+7.1%}", flush=True)


if __name__ == "__main__":
    main()
