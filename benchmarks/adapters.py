"""Memory of gradients and of the optimizer with the pass ``lora``, beside the same run of all weights.

Two steps of AdamW on one block of each width, in fp32; counted are the bytes of the tensors after the second one.
Allowed for rank 16: 0.02 of all weights. Usage: ``python benchmarks/adapters.py``.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.job import load_job
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.passes.order import sort_passes
from forge_core.registry.discovery import discover
from forge_core.train.build import build_model, build_optimizer

VOCABULARY = 256
JOB = """
[model]
name = "transformer"
n_layers = 1
n_heads = 16
max_seq_len = 16
[data]
name = "text_files"
path = "unused"
[train]
steps = 2
seq_len = 16
batch_size = 1
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 2048, 4096])
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    join_process_group(torch.device("cpu"))
    print(f"{'width':>6} {'all weights MiB':>16} {'adapters MiB':>13} {'of all weights':>15}")
    with TemporaryDirectory() as folder:
        config = Path(folder) / "job.toml"
        config.write_text(JOB)
        for width in arguments.widths:
            every = taken(config, [f"model.dim={width}"])
            adapters = taken(config, [f"model.dim={width}", f"parallel.passes.lora.rank={arguments.rank}"])
            columns = f"{every / 2**20:>16.1f} {adapters / 2**20:>13.2f} {adapters / every:>15.4f}"
            print(f"{width:>6} {columns}", flush=True)
    dist.destroy_process_group()


def taken(config: Path, overrides: list[str]) -> int:
    """Bytes of gradients and of the optimizer's state in the second step."""
    device, catalog = torch.device("cpu"), discover()
    job = load_job(config, overrides, catalog=catalog, world_size=1)
    build = ComponentBuilder(catalog)
    mesh = build_mesh(job, device)
    model = build_model(PassContext(mesh, job, device), VOCABULARY, sort_passes(job, catalog, 1), build)
    optimizer = build_optimizer(job, model, build)
    for _ in range(job.train.steps):
        optimizer.zero_grad(set_to_none=True)
        tokens = torch.randint(VOCABULARY, (job.train.batch_size, job.train.seq_len + 1))
        scale = torch.full((), 1 / job.train.seq_len)
        LEDGER.start_step(scale)
        model.executor.run([{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}], scale)
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters.values() if parameter.grad is not None]
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return sum(map(n_bytes, [*gradients, *state]))


def n_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
