"""Greedy generation on all ranks of a run, in any layout, for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from forge_core.config.sections import Job
from forge_core.contracts.evaluation import EvaluationContext
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer

FurtherEntries = Callable[[Sequence[int], int], Mapping[str, np.ndarray]]
"""Gives the entries of the prompts with these numbers, beside tokens and positions, in sequences of a length. Positions
after a prompt are for the tokens that are generated there."""


def generate_in_layout(
    context: EvaluationContext,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    has_ended: Callable[[Sequence[int]], bool] | None = None,
    inputs: FurtherEntries | None = None,
    forbidden: Sequence[int] = (),
) -> list[list[int]]:
    """Continue each prompt by the likeliest token, again and again.

    There is no cache: each token costs a forward of the whole sequences, which every layout can do. Prompts are dealt
    to the data-parallel ranks. Padding is at the right, so that a model that looks ahead would see it.

    Args:
        prompts: token ids, the same on all ranks, none empty.
        max_new_tokens: with the longest prompt at most what the model takes.
        has_ended: whether the new tokens of a prompt are all that is wanted of it; by default when the last one ends a
            document of ``context.tokenizer``, and never without a tokenizer.
        inputs: gives further entries of a batch, such as images.
        forbidden: token ids that are never taken.

    Returns:
        The new tokens of each prompt, the same on all ranks.
    """
    has_ended = has_ended or partial(_ends_document, context.tokenizer)
    new: list[list[int]] = [[] for _ in prompts]
    width = _width(context.job, max(map(len, prompts)) + max_new_tokens)
    for batch in context.batches(_Prompts(prompts, width, inputs)):
        tokens, positions = batch["tokens"].clone(), batch["positions"].clone()
        further = {name: one for name, one in batch.items() if name not in ("tokens", "positions", "targets")}
        row_of = {number: row for row, number in enumerate(batch["targets"][:, 0].tolist()) if number != IGNORED}
        ended: set[int] = set()
        for step in range(max_new_tokens):
            logits = context.predict({"tokens": tokens, "positions": positions, **further})
            likeliest: dict[int, int] = {}  # of an earlier stage of a pipeline, which has no logits
            if logits is not None:
                asked = {number: row for number, row in row_of.items() if number not in ended}
                places = [len(prompts[number]) + step - 1 for number in asked]
                chosen = logits[[*asked.values()], places]
                if forbidden:
                    there = [token for token in forbidden if token < chosen.shape[-1]]  # a head may lack some
                    chosen[:, there] = -torch.inf
                likeliest = dict(zip(asked, chosen.argmax(-1).tolist(), strict=True))
            found = _known_to_all(context, likeliest, len(prompts))
            written: list[tuple[int, int, int]] = []  # row, place, token
            for number, token in found.items():
                new[number].append(token)
                if has_ended(new[number]):
                    ended.add(number)
                elif number in row_of:
                    written.append((row_of[number], len(prompts[number]) + step, token))
            if written:  # at once, as a GPU makes the host wait for each number that is written there
                rows, columns, values = torch.tensor(written, device=tokens.device).unbind(1)
                tokens[rows, columns], positions[rows, columns] = values, columns
            if not found.keys() - ended:
                break
    return new


def _ends_document(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> bool:
    return tokenizer is not None and tokens[-1] == tokenizer.end_of_document


def _known_to_all(context: EvaluationContext, tokens: Mapping[int, int], n_prompts: int) -> dict[int, int]:
    """The new tokens of all ranks, by the numbers of their prompts. In the sum, 0 stands for none, and token 0 is 1."""
    summed = context.sum_over_ranks({str(number): tokens.get(number, -1) + 1 for number in range(n_prompts)})
    return {int(number): round(token) - 1 for number, token in summed.items() if token}


def _width(job: Job, needed: int) -> int:
    """The length of the sequences: ``train.seq_len``, which the layout can cut, or a half, a quarter … of it; of longer
    ones, the next length that it can cut."""
    width, parts = job.train.seq_len, 2 * job.parallel.cp * job.parallel.tp
    if needed > width:
        return -(-needed // parts) * parts
    while width // 2 >= needed and width % (2 * parts) == 0:
        width //= 2
    return width


class _Prompts:
    """Prompts as samples, each with its number as its first target, by which a rank knows what it was dealt."""

    vocab_size, fingerprint = 1, ""
    tokenizer: Tokenizer | None = None

    def __init__(self, prompts: Sequence[Sequence[int]], width: int, inputs: FurtherEntries | None) -> None:
        self._prompts = prompts
        self._width = width
        self._inputs = inputs

    def __len__(self) -> int:
        return len(self._prompts)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.zeros((len(indices), self._width), np.int64)
        targets, positions = np.full_like(tokens, IGNORED), np.full_like(tokens, -1)
        for row, number in enumerate(indices.tolist()):
            length = len(self._prompts[number])
            tokens[row, :length], positions[row, :length] = self._prompts[number], np.arange(length)
            targets[row, 0] = number
        further = {} if self._inputs is None else self._inputs(indices.tolist(), self._width)
        return {"tokens": tokens, "targets": targets, "positions": positions, **further}
