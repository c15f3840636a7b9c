"""The executor: forward and backward over the microbatches of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_core.contracts.batch import bind
from forge_core.contracts.loss import Loss

Batch = Mapping[str, torch.Tensor]


class PlainExecutor:
    """One microbatch after the other, gradients synchronised with the last."""

    binds_loss = True

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model = model
        self._loss = loss

    def run(self, microbatches: Sequence[Batch], scale: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``scale`` times the summed loss to the parameters' ``grad``.

        Args:
            microbatches: on the device.
            scale: fp32 scalar on the device, 1 / valid tokens of the step over all ranks.

        Returns:
            This rank's summed loss, an fp32 scalar on the device, not scaled.
        """
        sums = []
        for i, batch in enumerate(microbatches):
            if len(microbatches) > 1 and isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(i == len(microbatches) - 1)
            inputs, loss = bind(self._loss, batch)
            total = self._model(**inputs, loss=loss).total
            total.backward(scale)
            sums.append(total.detach())
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss (fp32) and the number of valid tokens (int64) of one batch of this rank."""
        inputs, loss = bind(self._loss, batch)
        summed = self._model(**inputs, loss=loss)
        return summed.total, summed.count

    @torch.no_grad()
    def predict(self, batch: Batch) -> torch.Tensor:
        """Same as ``PredictingExecutor.predict``."""
        inputs, _ = bind(self._loss, batch)
        logits: torch.Tensor = self._model(**inputs)
        return logits
