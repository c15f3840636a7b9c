"""Next-token cross-entropy on the full logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.loss import IGNORED, LossSum, VocabularyPart
from forge_plugins_optim.loss_config import CrossEntropyConfig
from forge_plugins_optim.token_weights import weighted
from forge_plugins_optim.vocabulary_parallel import logits_of_part, part_of_head, vocabulary_parallel_cross_entropy


def cross_entropy(config: CrossEntropyConfig, /) -> CrossEntropy:
    """Build the loss."""
    return CrossEntropy()


class CrossEntropy:
    """Sum of −log softmax(logits)[target], in fp32 for logits of any dtype: a sum of bf16 losses would have a
    resolution of 64 at 10,000 nats."""

    takes_weights = True

    def __call__(
        self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> LossSum:
        """The contract's; the logits ``(B, S, V)`` exist in the compute dtype and in fp32. Of a head that is cut by
        vocabulary, each rank has those of its part only."""
        part = part_of_head(hidden, head)
        if part is not None:
            each, _ = _by_vocabulary(part, targets)
        else:
            logits = head(hidden).flatten(0, 1).float()
            each = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
        return _summed(each, targets, weights)

    def with_z_loss(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        targets: torch.Tensor,
        coefficient: float,
        weights: torch.Tensor | None = None,
    ) -> tuple[LossSum, torch.Tensor]:
        """Same as ``ZLossInside``."""
        ignored = targets.flatten() == IGNORED
        part = part_of_head(hidden, head)
        if part is not None:
            each, partitions = _by_vocabulary(part, targets)
        else:
            logits = head(hidden).flatten(0, 1).float()
            partitions = logits.logsumexp(1)
            chosen = logits.gather(1, targets.flatten().masked_fill(ignored, 0).unsqueeze(1)).squeeze(1)
            each = (partitions - chosen).masked_fill(ignored, 0)
        penalty = coefficient * weighted(partitions.masked_fill(ignored, 0).square(), weights).sum()
        return _summed(each, targets, weights), penalty


def _by_vocabulary(part: VocabularyPart, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return vocabulary_parallel_cross_entropy(logits_of_part(part), targets.flatten(), part.start, part.group)


def _summed(each: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> LossSum:
    return LossSum(weighted(each, weights).sum(), (targets != IGNORED).sum(), each.detach().view(targets.shape))
