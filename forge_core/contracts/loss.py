"""Losses: what is minimised, computed from hidden states so that it can avoid building the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    import torch.distributed as dist
    from torch import nn

    from forge_core.contracts.builder import Builder

IGNORED = -100
"""The target where there is nothing to learn."""


class LossSum(NamedTuple):
    """Sums, not means: the engine divides by the number of valid tokens of the whole step, over all ranks."""

    total: torch.Tensor
    """Scalar, fp32, in nats: the sum over valid tokens, each times its weight where there are weights. Zero, and
    connected to the graph, where there are none."""
    count: torch.Tensor  # type: ignore[assignment]  # hides tuple.count, which is of no use here
    """Scalar, int64: the number of targets that are not −100."""
    each: torch.Tensor | None = None
    """``(B, S)`` as the targets, fp32, detached: the loss of each position in nats, 0 where there is no target. For
    reports, such as the loss of each source of data; a loss that does not have it at hand leaves it out."""


class VocabularyPart(NamedTuple):
    """The part of one rank of a head whose vocabulary is shared out over the ranks of ``group``.

    Each of them computes the same loss of the same tokens, and the gradient of its own part.
    """

    hidden: torch.Tensor
    """``(B, S, D)``, the same on each rank; multiply this, and not what ``vocabulary_part`` was given: gradients that
    reach it are summed over the group."""
    weight: torch.Tensor
    """``(V_part, D)``, rows ``start`` to ``start + V_part − 1`` of the whole; ranks may have different numbers."""
    bias: torch.Tensor | None
    """``(V_part,)``."""
    start: int
    group: dist.ProcessGroup
    cap: float | None = None
    """A head that caps its logits: they are ``cap · tanh(product / cap)``. A loss that multiplies by itself does so."""


class HeadInParts(Protocol):
    """A head that is cut by vocabulary."""

    def vocabulary_part(self, hidden: torch.Tensor) -> VocabularyPart:
        """This rank's part, for the final hidden states ``(B, S, D)``. Call it once a forward."""


class Loss(Protocol):
    """A callable without state.

    One that has an attribute ``takes_weights = True`` is called with a fourth argument, ``weights`` ``(B, S)`` fp32,
    where batches have such an entry: the total is the sum of ``weights · loss`` over valid tokens, ``count`` and
    ``each`` are as without them. The engine divides by the sum of the weights of valid tokens. A loss without the
    attribute is refused with such data.

    One that has an attribute ``takes_entries``, names such as ``("answers", "document")``, is called with these entries
    of the batch as keywords, in training and in evaluations; entries by position are those of the positions of
    ``targets``. It is refused with training data that lack one. Batches that are evaluated may have none, such as a
    text: it is then called without them.

    One that has an attribute ``has_perplexity = False`` is not the negative log-likelihood of its targets, such as an
    error of reconstruction: evaluations name no perplexity of it. If it takes entries, this is about batches that have
    them all; of others its loss is a likelihood.
    """

    def __call__(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> LossSum:
        """Sum the loss over all positions that have a target.

        Args:
            hidden: ``(B, S, D)``, the final hidden states after the norm, in the compute dtype.
            head: the output projection; ``head.weight`` is ``(V, D)``, ``head(hidden)`` gives logits ``(B, S, V)``.
                Under tensor parallelism it is a ``HeadInParts`` as well: calling it gathers the logits, and a loss that
                does without them all takes ``head.vocabulary_part`` instead. ``head.weight`` is a ``DTensor`` then.
            targets: ``(B, S)`` int64, already shifted: ``targets[b, s]`` is what position ``s`` should predict.
        """


def apply_loss(
    loss: Loss, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, weights: torch.Tensor | None
) -> LossSum:
    """Call a loss, with weights if there are any; for losses that stand around another."""
    call: Callable[..., LossSum] = loss
    return call(hidden, head, targets) if weights is None else call(hidden, head, targets, weights)


class LossFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, build: Builder) -> Loss:
        """Build the loss. ``build`` is for the loss that it stands around, if its config has one; a factory may leave
        the keyword out."""
