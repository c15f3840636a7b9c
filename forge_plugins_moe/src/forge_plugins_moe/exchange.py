"""Rows that travel between the ranks of a group, as many as each has for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

_collectives = torch.ops._c10d_functional


class Flight:
    """Rows on their way, while whoever sent them does other work.

    So are their gradients in backward, the other way: they leave where ``arrive`` was called, and autograd, which takes
    the latest operations first, does what stood between before it waits for them.

    Args:
        rows: ``(Σ sent, …)``.
        sent: rows for each rank, in order.
        received: rows from each rank.
        group: ``None`` is one of this rank alone.
    """

    def __init__(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self.sent, self.received, self.group = sent, received, group
        self.forward: _Exchange | None = None
        self.backward: _Exchange | None = None
        self._departed: torch.Tensor | None = _Depart.apply(rows, self)  # type: ignore[no-untyped-call]  # torch's

    def arrive(self) -> torch.Tensor:
        """The rows ``(Σ received, …)``, once."""
        arrived: torch.Tensor = _Arrive.apply(self._departed, self)  # type: ignore[no-untyped-call]  # torch's
        self._departed = None  # its graph knows this flight: memory would wait for the garbage collector
        return arrived


def exchange(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """``(Σ sent, …)`` to ``(Σ received, …)``, as a ``Flight`` that is waited for at once."""
    return Flight(rows, sent, received, group).arrive()


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """``(ranks, …)`` int64: what is for each rank, to what is from each."""
    if group is None:
        return counts
    even = [len(counts) // group.size()] * group.size()
    return _Exchange.begin(counts, even, even, group).end()


def to_host(sizes: Sequence[torch.Tensor], expected: Callable[[], Sequence[Sequence[int]]]) -> list[list[int]]:
    """All of them, with one wait.

    Args:
        sizes: int64 vectors.
        expected: what takes their place where tensors have no values, in ``forge plan``.
    """
    if isinstance(sizes[0], FakeTensor):
        return [[*one] for one in expected()]
    values = torch.cat([*sizes]).tolist()
    starts = [sum(len(one) for one in sizes[:i]) for i in range(len(sizes))]
    return [values[start : start + len(one)] for start, one in zip(starts, sizes, strict=True)]


@attrs.frozen(eq=False)
class _Exchange:
    """One that has begun."""

    rows: torch.Tensor
    group: dist.ProcessGroup | None

    @classmethod
    def begin(
        cls, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
    ) -> _Exchange:
        if group is not None:
            # an operation that returns its result, which selective recomputation can keep
            rows = _collectives.all_to_all_single(rows.contiguous(), [*received], [*sent], group.group_name)
        return cls(rows.contiguous(), group)

    def end(self) -> torch.Tensor:
        if self.group is None or isinstance(self.rows, FakeTensor):  # a plan would count another tensor
            return self.rows
        rows: torch.Tensor = _collectives.wait_tensor(self.rows)
        return rows


class _Depart(torch.autograd.Function):
    """What it gives stands for the rows in the graph: their memory is not to be looked at yet."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.forward = _Exchange.begin(rows, flight.sent, flight.received, flight.group)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        returning, ctx.flight.backward = ctx.flight.backward, None
        return returning.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, departed: torch.Tensor, flight: Flight) -> torch.Tensor:
        assert flight.forward is not None, "a flight arrives once"
        ctx.flight = flight
        exchange, flight.forward = flight.forward, None
        return exchange.end()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        flight = ctx.flight
        flight.backward = _Exchange.begin(gradients[0], flight.received, flight.sent, flight.group)
        return gradients[0].new_zeros(()), None
