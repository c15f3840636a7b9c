"""Denominators of a step's losses: counted on the host, summed over the ranks that have other samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from forge_core.contracts.loss import IGNORED
from forge_core.distributed.mesh import DATA_AXES, Mesh
from forge_core.train.executor import Batch
from forge_core.train.replication import Replicas


@attrs.frozen
class Scales:
    """fp32 scalars on the device, the same on all ranks of all replicas."""

    targets: torch.Tensor
    """One over the step's targets, or over the sum of their weights."""
    tokens: torch.Tensor
    """One over its tokens without padding."""
    own: Mapping[str, torch.Tensor]
    """One over what the model counts for losses of its own (``MultiTokenModel``), by name."""
    n_targets: torch.Tensor
    """The step's targets, or the sum of their weights; a metric."""


def step_scales(
    microbatches: Sequence[Batch], model: nn.Module, mesh: Mesh, device: torch.device, replicas: Replicas
) -> Scales:
    """Count a step, where its batches still are in the host's memory.

    Args:
        model: any part of it, as each knows what the whole model counts.
    """
    counts: list[float] = [sum(map(weight_of_targets, microbatches)), sum(map(count_tokens, microbatches))]
    count_own: Any = getattr(model, "count_targets", lambda batch: {})
    of_batches = [count_own(batch) for batch in microbatches]
    counts += [sum(one[name] for one in of_batches) for name in of_batches[0]]
    if mesh.dp_size == 1 and replicas.share.count == 1:
        n_targets, *scales = [torch.full((), n, device=device) for n in (counts[0], *(1 / (n or 1) for n in counts))]
    else:
        each = torch.stack([torch.full((), float(count), device=device) for count in counts])
        mesh.sum_over(each, DATA_AXES)
        summed = replicas.sum(each)
        n_targets, *scales = (summed[0], *torch.where(summed > 0, summed, 1).reciprocal_().unbind())
    return Scales(scales[0], scales[1], dict(zip(of_batches[0], scales[2:], strict=True)), n_targets)


def weight_of_targets(batch: Batch) -> float:
    """The sum of the weights of its targets; without weights, how many they are."""
    weights = batch.get("weights")
    if weights is None:
        return count_targets(batch)
    return float(weights.numpy()[batch["targets"].numpy() != IGNORED].sum(dtype=np.float64))


def count_targets(batch: Batch) -> int:
    """Positions that have something to learn."""
    return int(np.count_nonzero(batch["targets"].numpy() != IGNORED))


def count_tokens(batch: Batch) -> int:
    """All but padding; also the ones without a target."""
    positions = batch.get("positions")
    return batch["tokens"].numel() if positions is None else int(np.count_nonzero(positions.numpy() >= 0))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same tensors on ``device``, without waiting."""
    if device.type == "cpu":
        return batch
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
