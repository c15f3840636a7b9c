"""The dispatcher ``all_to_all``: each row goes straight to the rank that has its expert.

Shapes: A = assignments of this rank's tokens, R = rows that come to its experts, E = experts in all, e = experts a
rank, n = ranks along ``ep``, D = width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh

from forge_plugins_moe.dispatch import Assignments, Dispatched, Sorting, permute, sort_by_expert
from forge_plugins_moe.exchange import Flight, exchange_counts, to_host
from forge_plugins_moe.visits import MeanVisits


class AllToAllDispatcher:
    """One exchange there and one back; each takes part in both, with however few rows.

    Rows leave in the order of experts, so those for one rank stand together, and arrive by rank and then by expert.
    The host has to know how many come from where, for which it waits once a layer.
    """

    def __init__(self, *, n_experts: int, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        self._n_experts = n_experts

    def dispatch(self, tokens: torch.Tensor, assignments: Assignments) -> Dispatched:
        dispatched: Dispatched = self.arrive(self.depart(tokens, assignments))
        return dispatched

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        combined: torch.Tensor = self.gather(self.send_back(rows, dispatched))
        return combined

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the sizes of what is exchanged depend on data
    def depart(self, tokens: torch.Tensor, assignments: Assignments) -> _Departed:
        sorting = sort_by_expert(tokens, assignments, self._n_experts)
        counts = exchange_counts(sorting.counts.view(self._ranks, -1), self._group)
        sizes = sorting.counts.view(self._ranks, -1).sum(1), counts.sum(1)
        sent, received = to_host(sizes, lambda: [[len(assignments.expert) // self._ranks] * self._ranks] * 2)
        flight = Flight(sorting.rows[: sum(sent)], sent, received, self._group)
        return _Departed(sorting, counts, flight)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def arrive(self, departed: _Departed) -> Dispatched:
        rows = departed.flight.arrive()
        order = by_expert(departed.counts, len(rows))
        way_back = _WayBack(departed.sorting, order, departed.flight.sent, departed.flight.received)
        return Dispatched(permute(rows, order), departed.counts.sum(0), way_back)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def send_back(self, rows: torch.Tensor, dispatched: Dispatched) -> _Returning:
        back: _WayBack = dispatched.way_back
        flight = Flight(permute(rows, back.order, back=True), back.received, back.sent, self._group)
        return _Returning(back.sorting, flight)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def gather(self, returning: _Returning) -> torch.Tensor:
        returned = returning.flight.arrive()
        to_none = len(returning.sorting.order) - len(returned)
        return returning.sorting.combine(torch.cat([returned, returned.new_zeros(to_none, returned.shape[1])]))

    def sent_bytes(self, visits: MeanVisits, row_bytes: int) -> tuple[float, float]:
        each = visits.n_ranks // visits.n_nodes
        # there and back, and gradients likewise
        a_rank = 4 * row_bytes * visits.experts / visits.n_ranks
        return a_rank * (each - 1), a_rank * (visits.n_ranks - each)


@attrs.frozen(eq=False)
class _Departed:
    sorting: Sorting
    counts: torch.Tensor
    """``(n, e)`` int64: rows that come from each rank for each of this rank's experts."""
    flight: Flight


@attrs.frozen(eq=False)
class _WayBack:
    sorting: Sorting
    order: torch.Tensor
    """``(R,)``: where the rows that experts work on stood when they arrived."""
    sent: Sequence[int]
    """Rows that went to each rank."""
    received: Sequence[int]
    """Rows that came from each rank."""


@attrs.frozen(eq=False)
class _Returning:
    sorting: Sorting
    flight: Flight


def by_expert(counts: torch.Tensor, n_rows: int) -> torch.Tensor:
    """The order ``(R,)`` that brings rows which stand by rank and then by expert, ``counts`` ``(n, e)`` of each, into
    that of experts."""
    ranks, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    return expert.repeat_interleave(counts.flatten(), output_size=n_rows).argsort(stable=True)
