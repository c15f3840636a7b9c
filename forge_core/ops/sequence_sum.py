"""Statistics of a sequence whose positions may be on several ranks (context parallelism)."""

from __future__ import annotations

import torch
import torch.distributed as dist


class _Sharers:
    """The ranks that hold other positions of this rank's sequences."""

    group: dist.ProcessGroup | None = None
    ranks = 1


_SHARERS = _Sharers()
"""One a process, as the mesh is."""


def share_out_positions(group: dist.ProcessGroup | None) -> None:
    """Said by the pass that gives each rank of ``group`` a part of every sequence; ``None`` takes it back."""
    _SHARERS.group = group
    _SHARERS.ranks = 1 if group is None else group.size()


def whole_length(positions: int) -> int:
    """The length of sequences of which this rank has so many positions."""
    return positions * _SHARERS.ranks


def number_sequences(document: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A number for each sequence of a batch, or, where samples are packed, for each document.

    Args:
        document: ``(B, S)`` int64, 0 to S − 1 over the whole of each row; or ``None``.
        like: ``(B, S, …)``, for shape and device.

    Returns:
        ``(B, S)`` int64, below B · S · ranks that share the sequences.
    """
    rows, positions = like.shape[:2]
    start = torch.arange(rows, device=like.device)[:, None] * whole_length(positions)
    return start.expand(rows, positions) if document is None else start + document


def sum_by_sequence(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """For each token, the sum of ``values`` over all tokens of its sequence, on all ranks.

    Args:
        values: ``(T, E)``; the gradient does not pass them.
        sequence: ``(T,)`` int64, as ``FeedForward.forward`` is given it.

    Returns:
        ``(T, E)`` fp32.
    """
    summed: torch.Tensor = _sum_by_sequence(values.detach(), sequence)
    return summed


# An operator, so that a compiled graph does not hold the group, which is another one in each run.
@torch.library.custom_op("forge::sum_by_sequence", mutates_args=())
def _sum_by_sequence(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    # as many rows as there can be sequences: to look how many there are, the host would have to wait
    sums = values.new_zeros((len(sequence) * _SHARERS.ranks, values.shape[1]), dtype=torch.float32)
    sums.index_add_(0, sequence, values.float())
    if _SHARERS.group is not None:
        dist.all_reduce(sums, group=_SHARERS.group)
    return sums[sequence]


@_sum_by_sequence.register_fake
def _(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values, dtype=torch.float32)
