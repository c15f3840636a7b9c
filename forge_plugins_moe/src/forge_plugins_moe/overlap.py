"""Rows that travel to experts and back while something else is computed.

Shapes: T = tokens of a microbatch on this rank, A = assignments of them, D = width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from forge_plugins_moe.dispatch import Assignments, OverlappingDispatcher

Chunk = tuple[torch.Tensor, Assignments]


@attrs.define(eq=False)
class Meanwhile:
    """A layer that waits for no other rank, such as shared experts."""

    layer: nn.Module
    hidden: torch.Tensor
    _output: torch.Tensor | None = None

    def compute(self) -> None:
        """Now is a good time."""
        self._output = self.layer(self.hidden)

    def output(self) -> torch.Tensor:
        """What the layer gives, computed now if it was not yet."""
        if self._output is None:
            self.compute()
        assert self._output is not None, "it was computed"
        return self._output


def overlapped(
    dispatcher: OverlappingDispatcher,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    assignments: Assignments,
    chunks: int,
    meanwhile: Meanwhile | None,
) -> torch.Tensor:
    """The weighted sum of its experts' outputs for each token ``(T, D)``.

    One chunk travels while the experts work on the one before, and ``meanwhile`` is done while the first one travels.
    Backward does the same in reverse, as autograd takes the latest operations first.

    Args:
        compute: rows and the number of each expert, to rows.
        tokens: ``(T, D)``.
    """
    parts = _chunks(tokens, assignments, chunks)
    departed = dispatcher.depart(*parts[0])
    returning: list[Any] = []
    for following in (*parts[1:], None):
        next_departed: Any = None if following is None else dispatcher.depart(*following)
        if meanwhile is not None and not returning:
            meanwhile.compute()
        dispatched = dispatcher.arrive(departed)
        returning.append(dispatcher.send_back(compute(dispatched.rows, dispatched.counts), dispatched))
        departed = next_departed
    return _joined([dispatcher.gather(one) for one in returning], assignments)


def _chunks(tokens: torch.Tensor, assignments: Assignments, chunks: int) -> Sequence[Chunk]:
    """Of tokens with their assignments; or of assignments, where those of a token do not stand together."""
    if chunks == 1:
        return [(tokens, assignments)]
    top_k = assignments.top_k
    if top_k is None:  # those of an expert may stand together, and each chunk should have some of every expert
        return [(tokens, _taken(assignments, slice(first, None, chunks))) for first in range(chunks)]
    bounds = [(len(tokens) * i // chunks, len(tokens) * (i + 1) // chunks) for i in range(chunks)]
    cut = [(start, end, _taken(assignments, slice(start * top_k, end * top_k))) for start, end in bounds]
    return [(tokens[start:end], attrs.evolve(one, token=one.token - start)) for start, end, one in cut]


def _joined(outputs: Sequence[torch.Tensor], assignments: Assignments) -> torch.Tensor:
    if len(outputs) == 1:
        return outputs[0]
    if assignments.top_k is not None:
        return torch.cat([*outputs])
    wide = torch.promote_types(outputs[0].dtype, torch.float32)
    return torch.stack([*outputs]).sum(0, dtype=wide).to(outputs[0].dtype)


def _taken(given: Assignments, which: slice) -> Assignments:
    return attrs.evolve(given, token=given.token[which], expert=given.expert[which], weight=given.weight[which])
