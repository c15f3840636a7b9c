"""Log-likelihoods of continuations, computed in the layout of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import torch

from forge_core.contracts.evaluation import EvaluationContext
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer

FurtherEntries = Callable[[Sequence[int], int], Mapping[str, np.ndarray]]
"""Gives entries beside tokens and positions, by the numbers of what is asked, in sequences of a length."""


@attrs.frozen
class Score:
    """How a model likes a continuation."""

    log_likelihood: float
    """The sum over its tokens, in nats."""
    is_likeliest: bool
    """Each of its tokens is the likeliest one at its place."""


def score_continuations(
    context: EvaluationContext,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    inputs: FurtherEntries | None = None,
) -> list[Score]:
    """The score of each continuation of a context, equal on all ranks, which call it together.

    Where both are longer than ``max_length + 1`` tokens, the beginning is left out. Sequences that are equal but for
    their last tokens go through the model once. Padding is at the right, so that a model that looks ahead would see it.

    Args:
        pairs: token ids of contexts and continuations, the same on all ranks; no context is empty.
        max_length: of what the model is given, in tokens.
        inputs: gives further entries of the pairs with some numbers, such as images, in sequences of a length. Each
            pair then goes through the model by itself.
    """
    asked: dict[_Row, list[int]] = {}
    for number, (before, continuation) in enumerate(pairs):
        tokens = tuple([*before, *continuation][-(max_length + 1) :][:-1])
        asked.setdefault(_Row(tokens, 0 if inputs is None else number), []).append(number)
    rows = sorted(asked, key=lambda row: (-len(row.tokens), row))  # memory is short at once or never
    parallel = context.job.parallel
    source = _Rows(
        rows,
        rows_at_once=context.job.train.batch_size * (context.world_size // (parallel.tp * parallel.cp * parallel.pp)),
        multiple=2 * parallel.cp * parallel.tp,
        inputs=inputs,
    )
    sums = {name: 0.0 for number in range(len(pairs)) for name in (str(number), f"likeliest {number}")}
    for batch in context.batches(source):
        logits = context.predict({name: entry for name, entry in batch.items() if name != "targets"})
        if logits is not None:  # as it is on earlier stages of a pipeline
            numbered = batch["targets"][:, 0].tolist()
            found = {
                number: _scored(row_logits[: len(rows[row].tokens)], pairs[number][1])
                for row_logits, row in zip(logits, numbered, strict=True)
                if row != IGNORED
                for number in asked[rows[row]]
            }
            sums |= _by_name(found)
    summed = context.sum_over_ranks(sums)
    return [Score(summed[str(number)], summed[f"likeliest {number}"] == 1) for number in range(len(pairs))]


class _Row(NamedTuple):
    """What goes through the model once."""

    tokens: tuple[int, ...]
    pair: int
    """Whose further entries it has, if there are any."""


def _scored(logits: torch.Tensor, continuation: Sequence[int]) -> torch.Tensor:
    """Log-likelihood, and 1 or 0, ``(2,)`` fp32.

    Args:
        logits: ``(S, V)`` of a row; those of the continuation come last.
    """
    tokens = torch.tensor(continuation, dtype=torch.int64, device=logits.device)
    logits = logits[len(logits) - len(tokens) :].float()
    likelihoods = logits.log_softmax(-1).gather(-1, tokens[:, None])
    return torch.stack((likelihoods.sum(), (logits.argmax(-1) == tokens).all().float()))


def _by_name(found: Mapping[int, torch.Tensor]) -> dict[str, float]:
    """As entries of a sum; one copy from the device for a batch."""
    values = torch.stack([*found.values()]).tolist() if found else []
    return {
        name: value
        for number, both in zip(found, values, strict=True)
        for name, value in zip((str(number), f"likeliest {number}"), both, strict=True)
    }


class _Rows:
    """Sequences as samples, each with its number as its first target, by which a rank knows what it was dealt. All that
    go through the model at a time, on any rank, are padded to the longest of them.

    Args:
        rows: from the longest to the shortest.
        multiple: of which a length must be that the layout can cut.
    """

    vocab_size, fingerprint = 1, ""
    tokenizer: Tokenizer | None = None

    def __init__(
        self, rows: Sequence[_Row], *, rows_at_once: int, multiple: int, inputs: FurtherEntries | None
    ) -> None:
        self._rows = rows
        self._inputs = inputs
        self._rows_at_once = rows_at_once
        self._multiple = multiple

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        first = int(indices.min()) // self._rows_at_once * self._rows_at_once
        width = -(-len(self._rows[first].tokens) // self._multiple) * self._multiple
        tokens = np.zeros((len(indices), width), np.int64)
        targets, positions = np.full_like(tokens, IGNORED), np.full_like(tokens, -1)
        for row, number in enumerate(indices.tolist()):
            own = self._rows[number].tokens
            tokens[row, : len(own)], positions[row, : len(own)] = own, np.arange(len(own))
            targets[row, 0] = number
        pairs = [self._rows[number].pair for number in indices.tolist()]
        further = {} if self._inputs is None else self._inputs(pairs, width)
        return {"tokens": tokens, "targets": targets, "positions": positions, **further}
