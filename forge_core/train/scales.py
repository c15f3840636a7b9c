"""Factors of a step's losses: one over their denominators, and for backward in fp16 a loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from forge_core.config.sections import Precision
from forge_core.contracts.loss import IGNORED
from forge_core.distributed.mesh import DATA_AXES, Mesh
from forge_core.train.executor import Batch
from forge_core.train.gradients import multiply_gradients
from forge_core.train.replication import Replicas

_FIRST = 2.0**16
_GOOD_STEPS = 2000
"""The first loss scale, and the steps without an overflow after which it is doubled."""


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


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740), as ``torch.amp.GradScaler`` has it: with
    ``train.precision = "fp16"`` backward begins with the loss times a power of 2, as small gradients would be 0.

    The factor is 65,536 at first. It is halved after a step whose gradients overflow, and doubled after 2,000 steps
    without one. The host never waits for it.
    """

    factor: torch.Tensor | None = None
    """An fp32 scalar on the device; ``None`` in other precisions."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._is_used, self._device = precision == "fp16", device
        self.restart({})

    def restart(self, saved: Mapping[str, Any]) -> None:
        """Go on from a ``state``, or anew."""
        if self._is_used:
            values = saved.get("loss_scale") or (_FIRST, 0.0, 0.0)
            self.factor, self._good, self._overflows = (torch.full((), one, device=self._device) for one in values)

    def state(self) -> dict[str, list[float]]:
        """The factor, steps since it changed, and steps that overflowed."""
        if self.factor is None:
            return {}
        return {"loss_scale": torch.stack((self.factor, self._good, self._overflows)).tolist()}

    def metrics(self) -> dict[str, torch.Tensor]:
        """Values of a logged step."""
        return {} if self.factor is None else {"loss_scale": self.factor, "overflows": self._overflows}

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide by the factor, in place."""
        if self.factor is not None:
            multiply_gradients(gradients, self.factor.reciprocal())

    def find_overflow(self, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the norm of the gradients, 0 for an overflow; and 1 for an overflow, else 0, if there can be one.

        With a factor of 1 gradients that are not finite have another cause.
        """
        if self.factor is None:
            return norm, None
        overflows = ~norm.isfinite() & (self.factor > 1)
        return torch.where(overflows, 0.0, norm), overflows.float()

    def update(self, verdict: torch.Tensor, left_out: torch.Tensor) -> None:
        """Count a step.

        Args:
            verdict: 1 if it has another fault than an overflow, else 0; fp32.
            left_out: 1 if its update is left out.
        """
        if self.factor is None:
            return
        overflowed = left_out - verdict
        self._overflows = self._overflows + overflowed
        good = (self._good + 1 - left_out) * (1 - overflowed)
        grows = (good == _GOOD_STEPS).float()
        self.factor = (self.factor * (1 + grows - 0.5 * overflowed)).clamp(max=2.0**127)  # 2¹²⁸ is infinite
        self._good = good * (1 - grows)


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
    if (weights := batch.get("weights")) is None:
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
