"""Which places (nodes, ranks) tokens visit that go to experts there; the experts stand in the order of places.

Shapes: T = tokens, P = places, E = experts.
"""

from __future__ import annotations

import math

import attrs
import torch

from forge_plugins_moe.dispatch import Assignments


def visits(assignments: Assignments, n_tokens: int, n_experts: int, places: int) -> torch.Tensor:
    """``(P, T)`` bool: whether one of the token's experts is at the place."""
    place = assignments.expert // (n_experts // places)
    visited = torch.zeros((places + 1) * n_tokens, dtype=torch.bool, device=place.device)  # one more, for none
    return visited.scatter_(0, place * n_tokens + assignments.token, True).view(places + 1, n_tokens)[:places]


def expected_visits(n_experts: int, experts_per_token: float, places: int) -> float:
    """How many places a token visits on average if all sets of so many experts are equally likely.

    ``P · (1 − C(E − E/P, K) / C(E, K))``, also for a mean K that is no integer.
    """
    elsewhere = n_experts - n_experts // places
    if experts_per_token > elsewhere:
        return float(places)

    def log_choices(of: int) -> float:
        """Up to what depends on K alone."""
        return math.lgamma(of + 1) - math.lgamma(of - experts_per_token + 1)

    return places * (1 - math.exp(log_choices(elsewhere) - log_choices(n_experts)))


@attrs.frozen
class MeanVisits:
    """Of one token, where it goes."""

    experts: float
    ranks: float
    nodes: float
    n_ranks: int
    """Along ``ep``."""
    n_nodes: int

    @classmethod
    def of(cls, assignments: Assignments, n_tokens: int, n_experts: int, n_ranks: int, n_nodes: int) -> MeanVisits:
        """Counted; ``n_tokens`` is not 0."""
        ranks, nodes = (visits(assignments, n_tokens, n_experts, places) for places in (n_ranks, n_nodes))
        some = assignments.expert < n_experts
        experts, ranks_visited, nodes_visited = (one.sum().item() / n_tokens for one in (some, ranks, nodes))
        return cls(experts, ranks_visited, nodes_visited, n_ranks, n_nodes)
