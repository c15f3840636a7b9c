"""Ranks that write a checkpoint in shards, or read it in others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch._dynamo  # DTensor imports it when the first one is made: here it is before the ranks are forked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from faults.one_checkpoint import join, save
from forge_core.checkpoint.store import CheckpointStore

SHAPES = {
    "model.rows": (13, 5),  # divided by no number of ranks here
    "model.few": (3, 4),  # of four ranks, one has nothing
    "model.scale": (),
    "optimizer.rows.exp_avg": (13, 5),
    "optimizer.few.exp_avg": (3, 4),
    "optimizer.rows.step": (),
}
POSITION = 12345


def write(rank: int, ranks: int, scratch: Path, *, store: str) -> None:
    """Step 1, of values that no two elements share."""
    join(rank, ranks, scratch)
    whole = {
        key: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).add_(1000 * number).sqrt_()
        for number, (key, shape) in enumerate(SHAPES.items())
    }
    save(store, _sharded(whole, ranks), position=POSITION, background=True)
    _report(rank, scratch, whole, POSITION)


def read(rank: int, ranks: int, scratch: Path, *, store: str) -> None:
    """What was written, whole, and the position in the data, as every rank has read them."""
    join(rank, ranks, scratch)
    checkpoint = CheckpointStore(Path(store)).newest(print)
    assert checkpoint is not None
    tensors = _sharded({key: torch.full(shape, -1.0) for key, shape in SHAPES.items()}, ranks)
    checkpoint.load(tensors)
    whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in tensors.items()}
    _report(rank, scratch, whole, checkpoint.state()["position"])


def _sharded(whole: Mapping[str, torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    return {key: distribute_tensor(t.clone(), mesh, [Shard(0)]) if t.dim() else t.clone() for key, t in whole.items()}


def _report(rank: int, scratch: Path, whole: Mapping[str, torch.Tensor], position: int) -> None:
    digests = {key: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for key, tensor in whole.items()}
    (scratch / f"held{rank}.json").write_text(json.dumps({**digests, "position": position}))
