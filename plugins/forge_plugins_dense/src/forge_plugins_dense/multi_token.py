"""Predicting tokens beyond the next: what lies ahead of each position, and what predictors lose.

Shapes: B = batch, S = sequence, K = further tokens, D = width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forge_core.contracts.loss import IGNORED, Loss, LossSum
from forge_core.ops.accumulate import accumulate
from forge_core.ops.auxiliary_loss import attach_auxiliary_loss
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.multi_token_config import MultiTokenConfig

NOTHING = -1
"""The id of a further token that is not there."""


class LookingAhead:
    """Tells a decoder what lies ahead, as a forward pre-hook.

    So it sees whole sequences; hooks that come after it, as that of context parallelism does, cut what it adds as they
    cut the rest of a batch.
    """

    def __init__(self, depths: int) -> None:
        self._depths = depths

    def __call__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add ``further_tokens`` and ``further_targets`` to the arguments of ``Transformer.forward``."""
        inputs = dict(zip(("tokens", "targets", "loss"), args, strict=False)) | kwargs
        ids = inputs["tokens"] if model.embed is not None else inputs.get("token_ids")
        targets = inputs.get("targets")
        like = targets if ids is None else ids
        if like is None or inputs.get("cache") is not None:
            return None
        there = list(are_ahead(like, inputs.get("document"), inputs.get("positions"), self._depths))
        ids = torch.zeros_like(like) if ids is None else ids
        further = [ahead(ids, k).masked_fill(~one, NOTHING) for k, one in enumerate(there, start=1)]
        kwargs = kwargs | {"further_tokens": torch.stack(further, dim=-1)}
        if targets is not None:
            kwargs["further_targets"] = further_targets(targets, there)
        return args, kwargs


def further_targets(targets: torch.Tensor, there: Sequence[torch.Tensor]) -> torch.Tensor:
    """What predictors should predict, ``(B, S, K)``: the k-th what the model itself should k positions later.

    Args:
        targets: ``(B, S)``, those of the next token.
        there: from ``are_ahead``.
    """
    moved = [ahead(targets, k).masked_fill(~one, IGNORED) for k, one in enumerate(there, start=1)]
    return torch.stack(moved, dim=-1)


def are_ahead(
    like: torch.Tensor, document: torch.Tensor | None, positions: torch.Tensor | None, depths: int
) -> Iterator[torch.Tensor]:
    """Return whether the token k ahead is in the same document, and neither is padding, ``(B, S)`` bool for k = 1 to K.

    Args:
        like: ``(B, S)``.
        document, positions: as ``Model.forward`` takes them.
    """
    seq_len = like.shape[1]
    for k in range(1, depths + 1):
        there = torch.arange(seq_len, device=like.device).expand(like.shape) < seq_len - k
        if document is not None:
            there = there & (ahead(document, k) == document)
        if positions is not None:
            there = there & (ahead(positions, k) >= 0) & (positions >= 0)
        yield there


def ahead(entry: torch.Tensor, k: int) -> torch.Tensor:
    """``(B, S)`` of the positions k later. The last k have those of the first, which are not to be used."""
    return entry.roll(-k, dims=1)


def attach_predictions(
    summed: LossSum,
    hidden: torch.Tensor,
    embedded: torch.Tensor,
    predictors: Sequence[Any],
    surroundings: Sequence[BlockInputs],
    loss: Loss,
    head: nn.Module,
    targets: torch.Tensor,
    config: MultiTokenConfig,
    scaled: Callable[[torch.Tensor], torch.Tensor],
) -> LossSum:
    """``summed`` unchanged; in backward, the losses of all predictors are minimised as well.

    Each is an auxiliary loss ``multi_token_<k>`` of the value ``weight / K · Σ loss``, by the configured loss on the
    shared head. They are attached to the end of the graph: before the head, one use of its weights would come after
    another, which pipelines cannot have that compute the gradients of weights later than those of inputs.

    Args:
        summed: of the next token.
        hidden: ``(B, S, D)``, what the last block gives, before the norm.
        embedded: ``(B, S, K, D)``, the embeddings of the tokens ahead.
        predictors: K, of the base ``Predictor``, wrapped or not.
        surroundings: K; each has its own ``valid``.
        targets: ``(B, S, K)``, from ``further_targets``.
        scaled: multiplies what the head reads by the model's ``output_multiplier``.
    """
    total, further = summed.total, hidden
    for k, predictor in enumerate(predictors, start=1):
        own_targets = targets[..., k - 1].contiguous()
        further, normed = predictor(further, embedded[..., k - 1, :], surroundings[k - 1])
        normed = scaled(normed)
        own = loss(normed, head, own_targets)
        total = attach_auxiliary_loss(total, config.weight / config.depths * own.total, loss_name(k), place="head")
        measured = (own.total.detach().float(), own.count.float(), *_accepted(normed, head, own_targets, config))
        total = accumulate(total, predictor.measured, torch.stack(measured))
    return LossSum(total, summed.count, summed.each)


def loss_name(k: int) -> str:
    """Under which the loss of depth ``k`` is reported."""
    return f"multi_token_{k}"


def count_further_targets(batch: Mapping[str, torch.Tensor], config: MultiTokenConfig) -> dict[str, int]:
    """Same as ``MultiTokenModel.count_targets``."""
    if config.normalizer == "paper":
        return {}
    targets = batch["targets"]
    there = list(are_ahead(targets, batch.get("document"), batch.get("positions"), config.depths))
    counts = (further_targets(targets, there) != IGNORED).flatten(0, 1).sum(0)
    return {loss_name(k): count for k, count in enumerate(counts.tolist(), start=1)}


@torch.no_grad()
def _accepted(
    normed: torch.Tensor, head: nn.Module, targets: torch.Tensor, config: MultiTokenConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a sample of positions, at how many the likeliest token is the target, and how many have one; fp32 scalars."""
    seen = targets[:, :: config.acceptance_every]
    likeliest = head(normed[:, :: config.acceptance_every]).argmax(-1)
    return (likeliest == seen).sum().float(), (seen != IGNORED).sum().float()
