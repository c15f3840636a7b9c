"""A penalty on the log-partition, beside another loss."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.loss import IGNORED, Loss, LossSum, apply_loss
from forge_core.ops.auxiliary_loss import attach_auxiliary_loss
from forge_plugins_optim.loss_config import ZLossConfig
from forge_plugins_optim.token_weights import weighted


def z_loss(config: ZLossConfig, /, *, build: Builder) -> ZLoss:
    """Build the loss and the one that it stands around."""
    return ZLoss(build(config.loss), config.coefficient)


@runtime_checkable
class ZLossInside(Protocol):
    """A loss that has the log-partitions at hand, so that they are not computed once more."""

    def with_z_loss(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        targets: torch.Tensor,
        coefficient: float,
        weights: torch.Tensor | None = None,
    ) -> tuple[LossSum, torch.Tensor]:
        """The loss, and ``coefficient · Σ weight · logsumexp(logits)²`` over valid tokens, an fp32 scalar. If that has
        no gradient of its own, the gradient of the total has it in it."""
        ...


class ZLoss:
    """Another loss, and ``coefficient · logsumexp(logits)²`` a token, which keeps the partition near 1 (Chowdhery et
    al., 2022, https://arxiv.org/abs/2204.02311, section 5: coefficient 1e-4).

    The total stays that of the other loss; the penalty is minimised with it, divided by the same number of targets, and
    reported as ``auxiliary/z_loss``. In evaluation there is none.
    """

    def __init__(self, loss: Loss, coefficient: float) -> None:
        self._loss: Any = loss  # which takes entries, if it says so
        self._coefficient = coefficient
        self.takes_weights = getattr(loss, "takes_weights", False)
        self.takes_entries = getattr(loss, "takes_entries", ())
        self.has_perplexity = getattr(loss, "has_perplexity", True)

    def __call__(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        **taken: torch.Tensor,
    ) -> LossSum:
        """The contract's. Around a loss that takes entries or is no ``ZLossInside``, the head is applied once more, to
        all tokens."""
        loss = partial(self._loss, **taken)
        if not torch.is_grad_enabled():
            return apply_loss(loss, hidden, head, targets, weights)
        if isinstance(self._loss, ZLossInside) and not taken:
            summed, penalty = self._loss.with_z_loss(hidden, head, targets, self._coefficient, weights)
        else:
            summed = apply_loss(loss, hidden, head, targets, weights)
            partitions = head(hidden).float().logsumexp(-1).masked_fill(targets == IGNORED, 0)
            penalty = self._coefficient * weighted(partitions.square().flatten(), weights).sum()
        total = attach_auxiliary_loss(summed.total, penalty, "z_loss", place="head", follow=True)
        return summed._replace(total=total)
