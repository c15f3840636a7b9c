"""Ranks that write a checkpoint in shards, or read it in others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DTensor imports it when the first one is made: here it is before the ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_core.checkpoint.saver import Saver, Snapshot
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
    _join(rank, ranks, scratch)
    saver = Saver(CheckpointStore(Path(store)), torch.device("cpu"), background=True, timeout=60, may_commit=_always)
    whole = {
        key: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).add_(1000 * number).sqrt_()
        for number, (key, shape) in enumerate(SHAPES.items())
    }
    saver.save(
        Snapshot(
            step=1,
            tokens=POSITION,
            tensors=_sharded(whole, ranks),
            state={"position": POSITION},
            mesh={"pp": 1, "dp_shard": ranks},
            versions={},
            metrics={},
            write_more=lambda folder: {},
        )
    )
    saved = saver.finish()
    assert saved is not None
    assert saved.error is None, saved.error
    saver.close()
    _report(rank, scratch, whole, POSITION)


def read(rank: int, ranks: int, scratch: Path, *, store: str) -> None:
    """What was written, whole, and the position in the data, as every rank has read them."""
    _join(rank, ranks, scratch)
    checkpoint = CheckpointStore(Path(store)).newest(print)
    assert checkpoint is not None
    tensors = _sharded({key: torch.full(shape, -1.0) for key, shape in SHAPES.items()}, ranks)
    checkpoint.load(tensors)
    whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in tensors.items()}
    _report(rank, scratch, whole, checkpoint.state()["position"])


def _join(rank: int, ranks: int, scratch: Path) -> None:
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{scratch}/rendezvous", rank=rank, world_size=ranks, timeout=timeout)


def _sharded(whole: Mapping[str, torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    return {key: distribute_tensor(t.clone(), mesh, [Shard(0)]) if t.dim() else t.clone() for key, t in whole.items()}


def _report(rank: int, scratch: Path, whole: Mapping[str, torch.Tensor], position: int) -> None:
    digests = {key: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for key, tensor in whole.items()}
    (scratch / f"held{rank}.json").write_text(json.dumps({**digests, "position": position}))


def _always() -> None:
    pass
