"""Direct preference optimisation: of two answers, the one that is preferred becomes likelier.

Shapes: B samples of S tokens, T = B · S, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.loss import IGNORED, Loss, LossSum, apply_loss
from forge_core.errors import ConfigError
from forge_core.ops.auxiliary_loss import attach_auxiliary_loss
from forge_core.ops.sequence_sum import number_sequences, sum_by_sequence
from forge_plugins_optim.loss_config import DPOConfig
from forge_plugins_optim.vocabulary_parallel import KnownPart, part_of_head


def dpo(config: DPOConfig, /, *, build: Builder) -> DPO:
    """Build the loss and the one that gives it log-probabilities.

    Raises:
        ConfigError: that one does not take weights.
    """
    inner: Loss = build(config.loss)
    if not getattr(inner, "takes_weights", False):
        raise ConfigError(
            f"loss.loss: dpo gives weights to targets, which {config.loss.name} does not take (takes_weights); choose "
            "another, such as cross_entropy or chunked_cross_entropy"
        )
    return DPO(inner, config.beta, config.label_smoothing)


class DPO:
    """``−log σ(β · m)`` a pair, with the margin ``m = log π(c) − log ref(c) − (log π(r) − log ref(r))`` of the chosen
    answer c and the rejected one r (Rafailov et al., 2023, https://arxiv.org/abs/2305.18290, equation 7), in nats.

    With label smoothing ε it is ``−(1 − ε) · log σ(β · m) − ε · log σ(−β · m)``, for data of which the part ε has its
    answers the wrong way round (conservative DPO, https://ericmitchell.ai/cdpo.pdf).

    In a sample, documents 2k and 2k + 1 are the chosen and the rejected answer of a pair, with their prompt, and
    ``answers`` are their targets. A pair has one target in ``targets``, in its chosen document, where its loss stands:
    the engine divides by the number of pairs.

    The loss of a pair depends on its tokens through the margin alone, so its gradient is that of a cross-entropy whose
    targets have weights: ``σ``'s slope, times 1 in the chosen answer and −1 in the rejected one. The inner loss is
    called twice, first without gradients. So it never needs more memory than the inner loss does, and positions and
    vocabulary may be shared out over ranks.
    """

    takes_weights = True
    takes_entries = ("answers", "document", "reference")
    has_perplexity = False

    def __init__(self, loss: Loss, beta: float, label_smoothing: float) -> None:
        self._loss = loss
        self._beta = beta
        self._label_smoothing = label_smoothing

    def __call__(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        answers: torch.Tensor | None = None,
        document: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
    ) -> LossSum:
        """The contract's. A batch without pairs, such as a text that is evaluated, has the inner loss.

        Args:
            answers: ``(B, S)`` int64, the targets of both answers.
            document: ``(B, S)`` int64.
            reference: ``(B, S)`` fp32: the log-probability of an answer under the reference, in nats, at one of its
                positions, and 0 elsewhere.
        """
        if answers is None or document is None or reference is None:
            return apply_loss(self._loss, hidden, head, targets, weights)
        part = part_of_head(hidden, head)
        known: Any = head if part is None else KnownPart(head, part)
        is_chosen, has_loss = document % 2 == 0, targets != IGNORED
        with torch.no_grad():
            found = self._loss(hidden, known, answers)
            if found.each is None:
                raise ConfigError("loss.loss: dpo needs the loss of each target, and the LossSum of this one has none")
            ratios = -found.each - reference
            weight_of_pair = has_loss.float() if weights is None else has_loss * weights
            columns = (ratios * is_chosen, ratios * ~is_chosen, weight_of_pair)
            pair = number_sequences(document // 2, targets).flatten()
            sums = sum_by_sequence(torch.stack([one.flatten() for one in columns], dim=1), pair)
            chosen, rejected, weight = (one.view(targets.shape) for one in sums.unbind(1))
            each, slopes = self._loss_and_slope(chosen - rejected)
            each = each.masked_fill(~has_loss, 0)
        total = (each * weight_of_pair).sum()
        if torch.is_grad_enabled():
            of_targets = weight * slopes * torch.where(is_chosen, -1, 1)  # by −log π, not by log π
            inner = self._loss(hidden, known, answers, of_targets).total  # type: ignore[call-arg]  # takes_weights
            inner = self._reporting(inner, chosen, rejected, weight_of_pair)
            total = total + (inner - inner.detach())
        return LossSum(total, has_loss.sum(), each)

    def _loss_and_slope(self, margins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a pair with each margin, and how it changes with it."""
        scaled, smoothing = self._beta * margins, self._label_smoothing
        loss = -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)
        return loss, self._beta * (smoothing * scaled.sigmoid() - (1 - smoothing) * (-scaled).sigmoid())

    def _reporting(
        self, total: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, weight_of_pair: torch.Tensor
    ) -> torch.Tensor:
        """Means over pairs, of rewards ``β · log (π / ref)`` and of whether the chosen answer has the higher one."""
        values = {
            "reward_chosen": self._beta * chosen,
            "reward_rejected": self._beta * rejected,
            "reward_margin": self._beta * (chosen - rejected),
            "reward_accuracy": (chosen > rejected).float(),
        }
        for name, value in values.items():
            total = attach_auxiliary_loss(total, (value * weight_of_pair).sum(), name, place="head", follow=True)
        return total
