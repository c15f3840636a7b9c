"""Ranks that do nothing but save, and the judgement of what they have left."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import attrs
import torch
import torch._dynamo  # DTensor imports it when the first one is made: here it is before the ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from faults.savers import SAVERS
from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore
from forge_core.errors import ConfigError

ANNOUNCEMENTS = "announced"
"""In the scratch folder, a line for each thing that rank 0 has begun, acknowledged, or seen fail."""


def save_again_and_again(
    rank: int,
    ranks: int,
    scratch: Path,
    *,
    store: str,
    background: bool,
    values: int,
    steps: int,
    saver: str = "sound",
    gate: str | None = None,
) -> None:
    """Steps 1, 2, …, each full of its own number; the last two are kept.

    Args:
        values: float32 values in the checkpoint.
        saver: a key of ``SAVERS``.
        gate: a file to wait for before the first step.
    """
    SAVERS[saver]()
    dist.init_process_group(
        "gloo", f"file://{scratch}/rendezvous", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    folder = CheckpointStore(Path(store))
    writer = Saver(folder, torch.device("cpu"), background=background, timeout=30, may_commit=lambda: None)
    tensors = _tensors(values, ranks)
    while gate is not None and not Path(gate).exists():
        time.sleep(0.01)
    for step in range(1, steps + 1):
        for tensor in tensors.values():
            tensor.fill_(step)
        _announce(rank, scratch, "begin", step)
        writer.save(_snapshot(step, tensors, ranks))
        writer.wait_until_copied()
        if background:  # training goes on
            for tensor in tensors.values():
                tensor.fill_(-step)
        saved = writer.finish()
        assert saved is not None
        if saved.error is not None:
            _announce(rank, scratch, "failed", step)
            raise saved.error
        _announce(rank, scratch, "saved", step)
        if rank == 0:
            folder.remove([old for old in folder.steps()[:-2] if old != step])
    writer.close()


def _tensors(values: int, ranks: int) -> dict[str, torch.Tensor]:
    """Half of them in shards, as FSDP has them, half the same on every rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    tensors: dict[str, torch.Tensor] = {}
    for i in range(4):
        part = torch.zeros(values // 8 // ranks)
        tensors[f"model.{i}.sharded"] = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        tensors[f"model.{i}.whole"] = DTensor.from_local(torch.zeros(values // 8), mesh, [Replicate()], run_check=False)
    tensors["model.plain"] = torch.zeros(3)
    return tensors


def _snapshot(step: int, tensors: dict[str, torch.Tensor], ranks: int) -> Snapshot:
    def write_more(folder: Path) -> dict[str, object]:
        (folder / "job.toml").write_text(f"step = {step}\n" * 50)
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text(f"{step}" * 500)
        return {}

    return Snapshot(
        step=step,
        tokens=step,
        tensors=tensors,
        state={"step": step},
        mesh={"pp": 1, "dp_shard": ranks},
        versions={},
        metrics={},
        write_more=write_more,
    )


def _announce(rank: int, scratch: Path, what: str, step: int) -> None:
    if rank == 0:
        handle = os.open(scratch / ANNOUNCEMENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, f"{what} {step} {time.monotonic()}\n".encode())
        os.close(handle)


@attrs.frozen
class Announced:
    """How far rank 0 has come, as it says."""

    begun: int
    saved: int
    failed: int
    seconds: float
    """That the last save took, from its begin to its acknowledgement."""


def announced(scratch: Path) -> Announced:
    """As of now."""
    try:
        lines = [line.split() for line in (scratch / ANNOUNCEMENTS).read_text().splitlines()]
    except FileNotFoundError:
        return Announced(0, 0, 0, 0.0)
    steps = {what: [int(step) for kind, step, _ in lines if kind == what] for what in ("begin", "saved", "failed")}
    times = {(what, int(step)): float(at) for what, step, at in lines}
    last = max(steps["saved"], default=0)
    seconds = times[("saved", last)] - times[("begin", last)] if last else 0.0
    return Announced(max(steps["begin"], default=0), last, max(steps["failed"], default=0), seconds)


@attrs.frozen
class Verdict:
    """What a run that starts now would begin with, and what is wrong with that."""

    step: int
    problems: list[str]


def judge(store: Path, *, acknowledged: int, begun: int) -> Verdict:
    """A checkpoint that was acknowledged is there, everything that has the name of a checkpoint is whole, and what is
    read is what one step wrote."""
    damaged: list[str] = []
    try:
        found = CheckpointStore(store).newest(damaged.append)
        if found is None:
            return Verdict(0, [f"step {acknowledged} was acknowledged, and there is nothing"] if acknowledged else [])
        tensors = {key: torch.full(entry.size, -0.5) for key, entry in found.saved_tensors().items()}
        found.load(tensors)
        state = found.state()
    except ConfigError as error:
        return Verdict(0, [*damaged, str(error)])
    problems = [f"it has the name of a checkpoint: {line}" for line in damaged]
    if not acknowledged <= found.step <= begun:
        problems.append(f"step {found.step} is the newest, {acknowledged} was acknowledged, {begun} begun")
    values = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
    if values != {float(found.step)} or state["step"] != found.step:
        problems.append(f"step {found.step} has the values {sorted(values)} and the state {state}")
    return Verdict(found.step, problems)
