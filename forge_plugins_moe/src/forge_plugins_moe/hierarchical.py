"""The dispatcher ``hierarchical``: each token crosses to a node once, however many of its experts are there.

First to the rank at the same place on each node that has one of its experts, then from there to each rank of the node
that has one; the sums of what experts make of it take the same way back (Tutel, Hwang et al. 2022, arXiv 2206.03382;
DeepEP). Weights travel along, as they are needed where the first sum is made.

Shapes: T = tokens of this rank, A = assignments of tokens to experts, P = places (nodes, or ranks of a node), C =
copies of tokens, D = width of the residual stream, E = experts in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forge_plugins_moe.config import HierarchicalConfig
from forge_plugins_moe.dispatch import (
    Assignments,
    Dispatched,
    Sorting,
    copy_tokens,
    count_by_expert,
    sort_by_expert,
    sum_by_token,
)
from forge_plugins_moe.exchange import Flight, exchange_counts, to_host
from forge_plugins_moe.nodes import NodeGroups, Nodes
from forge_plugins_moe.visits import MeanVisits, expected_visits, visits

_KEY = "parallel.passes.expert_parallel.dispatcher.ranks_per_node"


class HierarchicalDispatcher:
    """Two exchanges there and two back; each rank takes part in all, with however few rows.

    The host has to know how many come from where, for both, for which it waits once a layer.
    """

    def __init__(self, config: HierarchicalConfig, *, n_experts: int, mesh: DeviceMesh) -> None:
        self.nodes = Nodes.of(mesh, config.ranks_per_node, _KEY)
        self._groups = NodeGroups.of(mesh, self.nodes)
        self._n_experts = n_experts

    def dispatch(self, tokens: torch.Tensor, assignments: Assignments) -> Dispatched:
        dispatched: Dispatched = self.arrive(self.depart(tokens, assignments))
        return dispatched

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        combined: torch.Tensor = self.gather(self.send_back(rows, dispatched))
        return combined

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the sizes of what is exchanged depend on data
    def depart(self, tokens: torch.Tensor, assignments: Assignments) -> _Departed:
        between, within = self._sizes(assignments, len(tokens))
        hop = _Hop(tokens, assignments, self._n_experts // self.nodes.count, between, self._groups.between)
        return _Departed(hop, within)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def arrive(self, departed: _Departed) -> Dispatched:
        experts_each = self._n_experts // self.nodes.count // self.nodes.ranks_each
        within = _Hop(*departed.between.arrive(), experts_each, departed.within, self._groups.within)
        sorting = sort_by_expert(*within.arrive(), experts_each)
        return Dispatched(sorting.rows, sorting.counts, _WayBack(departed.between, within, sorting))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def send_back(self, rows: torch.Tensor, dispatched: Dispatched) -> _Returning:
        back: _WayBack = dispatched.way_back
        of_this_rank = back.sorting.combine(rows)
        of_this_node = back.within.gather(back.within.send_back(of_this_rank))
        return _Returning(back.between, back.between.send_back(of_this_node))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def gather(self, returning: _Returning) -> torch.Tensor:
        return returning.between.gather(returning.flight)

    def sent_bytes(self, visits: MeanVisits, row_bytes: int) -> tuple[float, float]:
        each = visits.n_ranks // visits.n_nodes
        # rows there and back, and gradients likewise; and for each expert two ids, a weight and its gradient
        between = 4 * row_bytes * visits.nodes + 24 * visits.experts
        within = 4 * row_bytes * visits.ranks + 24 * visits.experts
        return within * (each - 1) / each, between * (visits.n_nodes - 1) / visits.n_nodes

    def _sizes(self, assignments: Assignments, n_tokens: int) -> tuple[_Sizes, _Sizes]:
        """Of the exchange between nodes, and of the one within this one."""
        nodes, ranks = self.nodes.count, self.nodes.ranks_each
        of_experts = count_by_expert(assignments.expert, self._n_experts)
        assigned = of_experts.view(nodes, ranks, -1).sum(2)
        visited = visits(assignments, n_tokens, self._n_experts, nodes * ranks)
        copies = visited.sum(1).view(nodes, ranks)
        copies_between = visited.view(nodes, ranks, n_tokens).any(1).sum(1)

        # what a rank will have to pass on within its node, the ranks that it comes from know already
        passed_on = torch.cat([copies_between[:, None], copies, assigned], dim=1)
        here = exchange_counts(passed_on, self._groups.between)
        copies_on, assigned_on = (here[:, 1:].sum(0).view(2, ranks)).unbind()
        from_within = exchange_counts(torch.stack([copies_on, assigned_on], dim=1), self._groups.within)
        sizes = (
            *(copies_between, here[:, 0], assigned.sum(1), here[:, 1 + ranks :].sum(1)),
            *(copies_on, from_within[:, 0], assigned_on, from_within[:, 1]),
        )
        on_host = to_host(sizes, lambda: self._expected(len(assignments.expert), n_tokens))
        return _Sizes.of(on_host[:4], sizes[:4]), _Sizes.of(on_host[4:], sizes[4:])

    def _expected(self, n_assignments: int, n_tokens: int) -> list[list[int]]:
        """Where all experts are equally likely."""
        nodes, ranks = self.nodes.count, self.nodes.ranks_each
        to_node, to_rank = (
            int(n_tokens * expected_visits(self._n_experts, n_assignments / max(n_tokens, 1), places) / places)
            for places in (nodes, nodes * ranks)
        )
        assigned = n_assignments // (nodes * ranks)
        between = [[to_node] * nodes] * 2 + [[assigned * ranks] * nodes] * 2
        return between + [[to_rank * nodes] * ranks] * 2 + [[assigned * nodes] * ranks] * 2


@attrs.frozen(eq=False)
class _Departed:
    between: _Hop
    within: _Sizes


@attrs.frozen(eq=False)
class _WayBack:
    between: _Hop
    within: _Hop
    sorting: Sorting


@attrs.frozen(eq=False)
class _Returning:
    between: _Hop
    flight: Flight


@attrs.frozen
class _Sizes:
    """For each place."""

    copies_sent: Sequence[int]
    copies_received: Sequence[int]
    assignments_sent: Sequence[int]
    assignments_received: Sequence[int]
    copies_from: torch.Tensor
    """``copies_received`` on the device; so that the host need not bring it there again."""
    assignments_from: torch.Tensor

    @classmethod
    def of(cls, on_host: Sequence[Sequence[int]], sizes: Sequence[torch.Tensor]) -> _Sizes:
        copies_sent, copies_received, assignments_sent, assignments_received = on_host
        return cls(copies_sent, copies_received, assignments_sent, assignments_received, sizes[1], sizes[3])


class _Hop:
    """Sends one copy of a token to each place that has one of its experts, with its assignments there; and sums up what
    comes back.

    Args:
        tokens: ``(T, D)``.
        assignments: of experts in the order of places; E is none.
        experts_each: at each place.
        group: one rank at each place.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        assignments: Assignments,
        experts_each: int,
        sizes: _Sizes,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._sizes, self._group = sizes, group
        self._n_tokens = len(tokens)
        places = len(sizes.copies_sent)
        visited = visits(assignments, len(tokens), places * experts_each, places)
        self._token = visited.nonzero_static(size=sum(sizes.copies_sent))[:, 1]  # which one each copy is of

        sent = assignments.expert.argsort(stable=True)[: sum(sizes.assignments_sent)]
        token, expert = assignments.token[sent], assignments.expert[sent]
        place = expert // experts_each
        copy = (visited.cumsum(1) - 1)[place, token]  # among those for its place
        ids = torch.stack([copy, expert - place * experts_each], dim=1)
        by_assignment = sizes.assignments_sent, sizes.assignments_received, group
        self._ids = Flight(ids, *by_assignment)
        self._weights = Flight(assignments.weight[sent], *by_assignment)
        copies = copy_tokens(tokens, self._token)
        self._copies = Flight(copies, sizes.copies_sent, sizes.copies_received, group)

    def arrive(self) -> tuple[torch.Tensor, Assignments]:
        """The copies that come here ``(C, D)``, and what is to become of them."""
        copy, expert = self._ids.arrive().unbind(1)
        before = self._sizes.copies_from.cumsum(0) - self._sizes.copies_from
        start = before.repeat_interleave(self._sizes.assignments_from, output_size=len(copy))
        weight = self._weights.arrive()
        return self._copies.arrive(), Assignments(copy + start, expert, weight)

    def send_back(self, rows: torch.Tensor) -> Flight:
        """``(C, D)``, what became of the copies that came here."""
        return Flight(rows, self._sizes.copies_received, self._sizes.copies_sent, self._group)

    def gather(self, flight: Flight) -> torch.Tensor:
        """Their sum for each token, ``(T, D)``, in fp32 meanwhile."""
        rows = flight.arrive()
        return sum_by_token(rows, self._token, self._n_tokens)
