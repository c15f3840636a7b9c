"""Softmax and cross-entropy of logits of which each rank has some columns; they are never gathered.

Shapes: T tokens, V columns of this rank.
"""

# Names end in their shape, in capitals:

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from forge_core.contracts.loss import IGNORED, VocabularyPart


def part_of_head(hidden: torch.Tensor, head: nn.Module) -> VocabularyPart | None:
    """This rank's part of a head that is cut by vocabulary; ``None`` for a whole one."""
    if not hasattr(head, "vocabulary_part"):
        return None
    part: VocabularyPart = head.vocabulary_part(hidden)  # type: ignore[operator]  # the contract of HeadInParts
    return part


def logits_of_part(part: VocabularyPart) -> torch.Tensor:
    """This rank's columns of the logits ``(T, V)``, fp32."""
    return capped(torch.nn.functional.linear(part.hidden, part.weight, part.bias).flatten(0, 1).float(), part.cap)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap · tanh(logits / cap)``; without a cap, the logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


class KnownPart:
    """A head that is cut by vocabulary, with this rank's part: losses that stand around each other share it, and hidden
    states are gathered once."""

    def __init__(self, head: nn.Module, part: VocabularyPart) -> None:
        self._head = head
        self._part = part

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def vocabulary_part(self, hidden: torch.Tensor) -> VocabularyPart:
        """Same as ``HeadInParts``, of the hidden states that the part was made for."""
        return self._part


def vocabulary_parallel_cross_entropy(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, start: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """−log softmax(logits)[target] of each token, 0 where there is no target; the same on every rank of the group
    (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Args:
        logits_TV: fp32, columns ``start`` to ``start + V − 1`` of the whole vocabulary.
        targets_T: int64 ids of the whole vocabulary, −100 where there is none.

    Returns:
        The losses ``(T,)``, and the log-partitions ``(T,)``, whose gradient must be 0 where there is no target.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _VocabularyParallelCrossEntropy.apply(logits_TV, targets_T, start, group)  # type: ignore[no-untyped-call]  # torch's
    return found


def softmax_parts(
    logits_TV: torch.Tensor, targets_T1: torch.Tensor, start: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, probabilities and log-partitions from two small all-reduces: of the maxima, and of sums and targets'
    logits together.

    Args:
        logits_TV: fp32, from column ``start`` of the whole vocabulary on.
        targets_T1: int64 ids of the whole vocabulary.

    Returns:
        −log softmax(logits)[target], ``(T, 1)``, this rank's columns of softmax(logits), ``(T, V)``, and the logarithm
        of the sum of exp(logits), ``(T, 1)``.
    """
    maxima_T1 = logits_TV.amax(1, keepdim=True)
    dist.all_reduce(maxima_T1, dist.ReduceOp.MAX, group=group)
    shifted_TV = logits_TV - maxima_T1
    columns_T1, elsewhere_T1 = _columns(targets_T1, start, logits_TV.shape[1])
    chosen_T1 = shifted_TV.gather(1, columns_T1).masked_fill_(elsewhere_T1, 0)
    exponentials_TV = shifted_TV.exp_()
    sums_and_chosen_T2 = torch.cat((exponentials_TV.sum(1, keepdim=True), chosen_T1), dim=1)
    dist.all_reduce(sums_and_chosen_T2, group=group)
    sums_T1, chosen_T1 = sums_and_chosen_T2[:, :1], sums_and_chosen_T2[:, 1:]
    logs_T1 = sums_T1.log()
    return logs_T1 - chosen_T1, exponentials_TV.div_(sums_T1), logs_T1 + maxima_T1


def subtract_targets(probabilities_TV: torch.Tensor, targets_T1: torch.Tensor, start: int) -> torch.Tensor:
    """softmax − one_hot(target), in place: the gradient of the loss by this rank's logits."""
    columns_T1, elsewhere_T1 = _columns(targets_T1, start, probabilities_TV.shape[1])
    ones_T1 = (~elsewhere_T1).to(probabilities_TV.dtype)
    return probabilities_TV.scatter_add_(1, columns_T1, -ones_T1)


def _columns(targets_T1: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this rank has the targets' columns (0 where it has not), and where it has not."""
    columns_T1 = targets_T1 - start
    elsewhere_T1 = (columns_T1 < 0) | (columns_T1 >= width)
    return columns_T1.masked_fill(elsewhere_T1, 0), elsewhere_T1


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor, start: int, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ignored_T1 = (targets_T == IGNORED).unsqueeze(1)
        targets_T1 = targets_T.unsqueeze(1).masked_fill(ignored_T1, 0)
        losses_T1, probabilities_TV, partitions_T1 = softmax_parts(logits_TV, targets_T1, start, group)
        gradient_TV = subtract_targets(probabilities_TV, targets_T1, start).masked_fill_(ignored_T1, 0)
        ctx.save_for_backward(gradient_TV, targets_T1)
        ctx.start = start
        return losses_T1.masked_fill(ignored_T1, 0).squeeze(1), partitions_T1.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor, of_partitions_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # that of a partition is softmax, of which a loss has one_hot(target) less
        gradient_TV, targets_T1 = ctx.saved_tensors
        scaled_TV = gradient_TV * (grad_T + of_partitions_T).unsqueeze(1)
        columns_T1, elsewhere_T1 = _columns(targets_T1, ctx.start, scaled_TV.shape[1])
        scaled_TV.scatter_add_(1, columns_T1, of_partitions_T.unsqueeze(1).masked_fill(elsewhere_T1, 0))
        return scaled_TV, None, None, None
