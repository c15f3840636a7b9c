"""Ranks that are forked join, and save one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore


def join(rank: int, ranks: int, scratch: Path) -> None:
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{scratch}/rendezvous", rank=rank, world_size=ranks, timeout=timeout)


def save(store: str, tensors: Mapping[str, torch.Tensor], *, position: int = 0, background: bool = False) -> None:
    """Save them as step 1."""
    place, cpu = CheckpointStore(Path(store)), torch.device("cpu")
    saver = Saver(place, cpu, background=background, timeout=60, may_commit=lambda: None)
    saver.save(
        Snapshot(
            step=1,
            tokens=position,
            tensors=tensors,
            state={"position": position},
            mesh={"pp": 1, "dp_shard": dist.get_world_size()},
            versions={},
            metrics={},
            write_more=lambda folder: {},
        )
    )
    saved = saver.finish()
    assert saved is not None
    assert saved.error is None, saved.error
    saver.close()
