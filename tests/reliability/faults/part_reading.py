"""Ranks that write a checkpoint in one layout and read it in others, and count what they read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # DTensor imports it when the first one is made: here it is before the ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from faults.one_checkpoint import join, save
from forge_core.checkpoint.store import CheckpointStore

SHAPES = {"model.w": (128, 8192), "optimizer.w.exp_avg": (128, 8192), "model.norm": (100,), "optimizer.w.step": ()}
DTYPES = {"optimizer.w.exp_avg": torch.bfloat16}
LAYOUTS = {
    "rows": [Shard(0)],  # fsdp
    "columns": [Shard(1)],  # tensor parallelism
    "rows and columns": [Shard(0), Shard(1)],
}


def write(rank: int, ranks: int, scratch: Path, *, store: str, layout: str) -> None:
    join(rank, ranks, scratch)
    save(store, {key: _sharded(_values(key), layout) for key in SHAPES})


def read(rank: int, ranks: int, scratch: Path, *, stores: Sequence[str]) -> None:
    """Each checkpoint in each layout. Reports how many bytes this rank needs and has read, of how many records, how
    often it opened each file, and whether it has what was saved."""
    join(rank, ranks, scratch)
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(Path(str(args[0])).name) if event == "open" else None)
    reports = []
    for store in stores:
        checkpoint = CheckpointStore(Path(store)).newest(print)
        assert checkpoint is not None
        for layout in LAYOUTS:
            if layout == "rows and columns" and ranks % 2:
                continue
            tensors = {key: _sharded(torch.full_like(_values(key), -1), layout) for key in SHAPES}
            opened.clear()
            before = _bytes_read()
            checkpoint.load(tensors)
            n_bytes = _bytes_read() - before
            files = [name for name in opened if name.endswith(".distcp")]
            expected = {key: _sharded(_values(key), layout) for key in SHAPES}
            reports.append(
                {
                    "of": [store, layout],
                    "needed": sum(_local(tensor).nbytes for tensor in tensors.values()),
                    "read": n_bytes,
                    "records": sum(len(entry.chunks) for entry in checkpoint.saved_tensors().values()),
                    "opened": {name: files.count(name) for name in files},
                    "right": all(torch.equal(_local(tensors[key]), _local(expected[key])) for key in SHAPES),
                }
            )
    (scratch / f"read{rank}.json").write_text(json.dumps(reports))


def _bytes_read() -> int:
    """By this process, of files and pipes, from the disk or from memory."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def _values(key: str) -> torch.Tensor:
    """No two elements are the same, but for rounding."""
    shape = torch.Size(SHAPES[key])
    return torch.arange(shape.numel(), dtype=torch.float32).add_(len(key)).sqrt_().reshape(shape).to(DTYPES.get(key))


def _sharded(whole: torch.Tensor, layout: str) -> torch.Tensor:
    if not whole.dim():
        return whole
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2) if layout == "rows and columns" else (ranks,))
    places = [one if one.dim < whole.dim() else Replicate() for one in LAYOUTS[layout]]
    return distribute_tensor(whole, mesh, places)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
