"""Label smoothing, around another loss.

Shapes: T tokens, D model width, V vocabulary, or this rank's part of it.
"""

# Names end in their shape, in capitals:

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.loss import IGNORED, Loss, LossSum, VocabularyPart, apply_loss
from forge_core.ops.auxiliary_loss import attach_auxiliary_loss
from forge_plugins_optim.loss_config import LabelSmoothingConfig
from forge_plugins_optim.token_weights import weighted
from forge_plugins_optim.vocabulary_parallel import KnownPart, logits_of_part, part_of_head


def label_smoothing(config: LabelSmoothingConfig, /, *, build: Builder) -> LabelSmoothing:
    """Build the loss and the one that it stands around."""
    return LabelSmoothing(build(config.loss), config.smoothing)


class LabelSmoothing:
    """Another loss with targets of which the part ε is spread evenly over the vocabulary (Szegedy et al., 2016,
    https://arxiv.org/abs/1512.00567, section 7), as ``label_smoothing`` of ``torch.nn.functional.cross_entropy``.

    Cross-entropy with such targets is ``(1 − ε) · CE + ε · mean over v of −log p_v = CE + ε · (x_target − mean x)``
    with logits x: the partition is in both terms and cancels. So the total stays that of the other loss, comparable
    with runs without smoothing; the rest is minimised with it and reported as ``auxiliary/label_smoothing``. It is
    linear in the logits, and computed from two products with ``(T, D)`` without them. In evaluation there is none.
    """

    def __init__(self, loss: Loss, smoothing: float) -> None:
        self._loss: Any = loss  # which takes entries, if it says so
        self._smoothing = smoothing
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
        """The contract's. With a head that does more than multiply and add, it is applied once more, to all tokens."""
        loss = partial(self._loss, **taken)
        if not torch.is_grad_enabled():
            return apply_loss(loss, hidden, head, targets, weights)
        part = part_of_head(hidden, head)
        if part is None:
            summed = apply_loss(loss, hidden, head, targets, weights)
            differences_T = _of_whole(hidden, head, targets)
        else:
            known: Any = KnownPart(head, part)
            summed = apply_loss(loss, hidden, known, targets, weights)
            differences_T = _of_part(part, targets)
        # a rounding error may not reach what is ignored
        differences_T = differences_T.masked_fill(targets.flatten() == IGNORED, 0)
        rest = self._smoothing * weighted(differences_T, weights).sum()
        total = attach_auxiliary_loss(summed.total, rest, "label_smoothing", place="head", follow=True)
        return summed._replace(total=total)


def _of_whole(hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
    """The target's logit less the mean of all, ``(T,)`` in fp32."""
    ignored_T1 = (targets.flatten() == IGNORED).unsqueeze(1)
    targets_T1 = targets.flatten().unsqueeze(1).masked_fill(ignored_T1, 0)
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        logits_TV = head(hidden).flatten(0, 1).float()
        above_T1: torch.Tensor = logits_TV.gather(1, targets_T1) - logits_TV.mean(1, keepdim=True)
        return above_T1.squeeze(1)
    hidden_TD = _wide(hidden.flatten(0, 1)).masked_fill(ignored_T1, 0)
    linear: Any = head
    weight: torch.Tensor = linear.weight
    bias: torch.Tensor | None = linear.bias
    rows_TD = torch.nn.functional.embedding(targets_T1.squeeze(1), weight)
    differences_T = (hidden_TD * (_wide(rows_TD) - _wide(weight).mean(0))).sum(1)
    return differences_T if bias is None else differences_T + (_wide(bias)[targets_T1.squeeze(1)] - _wide(bias).mean())


def _of_part(part: VocabularyPart, targets: torch.Tensor) -> torch.Tensor:
    """The same on every rank of the group, of which each has some rows of the head."""
    targets_T = targets.flatten() - part.start
    elsewhere_T = (targets_T < 0) | (targets_T >= len(part.weight))
    targets_T = targets_T.masked_fill(elsewhere_T, 0)
    if part.cap is None:
        chosen_T, sums_T = _linear_in_part(part, targets, targets_T, elsewhere_T)
    else:
        logits_TV = logits_of_part(part)
        chosen_T = logits_TV.gather(1, targets_T.unsqueeze(1)).squeeze(1).masked_fill(elsewhere_T, 0)
        sums_T = logits_TV.sum(1)
    sizes_T = torch.full_like(sums_T, len(part.weight))
    summed: torch.Tensor = _SumOfParts.apply(torch.stack((chosen_T, sums_T, sizes_T)), part.group)  # type: ignore[no-untyped-call]  # torch's
    return summed[0] - summed[1] / summed[2]


def _linear_in_part(
    part: VocabularyPart, targets: torch.Tensor, targets_T: torch.Tensor, elsewhere_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's logit, 0 where another rank has it, and the sum of this rank's, without the logits."""
    hidden_TD = _wide(part.hidden.flatten(0, 1)).masked_fill((targets.flatten() == IGNORED).unsqueeze(1), 0)
    rows_TD = _wide(torch.nn.functional.embedding(targets_T, part.weight)).masked_fill(elsewhere_T.unsqueeze(1), 0)
    chosen_T, sums_T = (hidden_TD * rows_TD).sum(1), hidden_TD @ _wide(part.weight).sum(0)
    if part.bias is not None:
        chosen_T = chosen_T + _wide(part.bias)[targets_T].masked_fill(elsewhere_T, 0)
        sums_T = sums_T + _wide(part.bias).sum()
    return chosen_T, sums_T


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _SumOfParts(torch.autograd.Function):
    """The sum over ranks, which then all compute the same from it, so that each goes on with its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
