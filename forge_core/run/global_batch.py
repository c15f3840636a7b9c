"""How many sequences a step has: as many as the job says, and on another number of ranks as many as before."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import attrs

from forge_core.checkpoint.store import Checkpoint
from forge_core.config.sections import Job
from forge_core.distributed.mesh import DATA_AXES
from forge_core.errors import ConfigError


def with_global_batch(job: Job, ranks: int, checkpoint: Checkpoint | None, report: Callable[[str], None]) -> Job:
    """``job`` with both ``train.global_batch_size`` and ``train.grad_accumulation``.

    The global batch is that of ``checkpoint``, however many ranks there were, unless the job gives a global batch, or
    another microbatch or accumulation than the job which wrote the checkpoint.

    Args:
        ranks: data-parallel ones.

    Raises:
        ConfigError: the checkpoint's global batch cannot be made up by these ranks.
    """
    train = job.train
    microbatch, total = train.batch_size * ranks, train.global_batch_size
    if total is None:
        total = microbatch * (train.grad_accumulation or 1)
        if checkpoint is not None and (kept := _unchanged(job, checkpoint)) is not None and kept != total:
            if kept % microbatch:
                raise ConfigError(_cannot_be_kept(job, ranks, checkpoint, kept))
            report(
                f"train.global_batch_size stays {kept}, as in {checkpoint.path.name}: train.grad_accumulation is now "
                f"{kept // microbatch}, with batch_size × data-parallel ranks = {train.batch_size} × {ranks}"
            )
            total = kept
    resolved = attrs.evolve(train, grad_accumulation=total // microbatch, global_batch_size=total)
    return attrs.evolve(job, train=resolved)


def _unchanged(job: Job, checkpoint: Checkpoint) -> int | None:
    """The checkpoint's global batch, if this job asks for nothing else; ``None`` if it does."""
    saved = checkpoint.job()["train"]
    batch_size, total = int(saved["batch_size"]), int(saved["global_batch_size"])
    ranks = prod(checkpoint.manifest.mesh.get(axis, 1) for axis in DATA_AXES)
    asked = checkpoint.state().get("accumulation_asked_for", total // (batch_size * ranks))
    return total if (job.train.batch_size, job.train.grad_accumulation) == (batch_size, asked) else None


def _cannot_be_kept(job: Job, ranks: int, checkpoint: Checkpoint, total: int) -> str:
    microbatch = job.train.batch_size * ranks
    fitting = next((size for size in range(job.train.batch_size, 0, -1) if total % (size * ranks) == 0), None)
    keep = f"To keep it, set train.global_batch_size = {total} and train.batch_size = {fitting}. " if fitting else ""
    return (
        f"train.batch_size: {checkpoint.path} has been trained with a global batch of {total} sequences, which is no "
        f"multiple of batch_size × data-parallel ranks = {job.train.batch_size} × {ranks} = {microbatch}. {keep}To go "
        f"on with another one, set train.global_batch_size to a multiple of {microbatch}."
    )
