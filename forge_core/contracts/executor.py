"""Executors: how forward and backward run over the microbatches of one step. A split pass brings its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class Executor(Protocol):
    """Built once a run, after all passes, from this rank's parts of the model.

    An executor that calls ``forge_core.contracts.batch.bind`` has an attribute ``binds_loss = True``. Another one gives
    all entries to forward, and is refused where some are the engine's.
    """

    def run(self, microbatches: Sequence[Mapping[str, torch.Tensor]], scale: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``scale`` times the summed loss to the parameters' ``grad``.

        Args:
            microbatches: on the device, with ``tokens`` and ``targets``. What forward is given of one, and the loss
                that it is given, are what ``forge_core.contracts.batch.bind(loss, batch)`` says.
            scale: fp32 scalar on the device, 1 / valid tokens of the step over all ranks.

        Returns:
            This rank's summed loss, an fp32 scalar on the device, not scaled; 0 on a rank that computes no loss. The
            engine sums it over all axes but ``tp``.
        """

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's summed loss (fp32) and the number of valid tokens it is over (int64) for one batch, without
        gradients; both 0 on a rank that computes no loss."""


@runtime_checkable
class PredictingExecutor(Executor, Protocol):
    """The protocol of executors that run the model without its loss, for evaluations that look at logits."""

    def predict(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Logits ``(B, S, V)`` of whole sequences for one batch of this rank, without gradients; ``None`` on a rank of
        an earlier pipeline stage."""
