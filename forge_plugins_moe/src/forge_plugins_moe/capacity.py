"""Experts with room for so many tokens and no more (Lepikhin et al. 2020, arXiv 2006.16668, section 2.2)."""

from __future__ import annotations

import attrs
import torch

from forge_plugins_moe.config import MoEConfig
from forge_plugins_moe.dispatch import Assignments, count_by_expert
from forge_plugins_moe.exact_share import exact_share


def drop_beyond_capacity(
    assignments: Assignments, n_tokens: int, config: MoEConfig
) -> tuple[Assignments, torch.Tensor]:
    """Send to no expert what an expert has no room for, whichever of a token's choices it is. The host does not wait.
    Assignments to none, such as those of padding, make no room.

    Returns:
        As many assignments, and how many of each expert's were dropped, ``(E,)`` int64.
    """
    assert config.capacity_factor is not None, "without one, nothing is dropped"
    expert, weight = assignments.expert, assignments.weight
    some = expert < config.n_experts
    share = exact_share(config.capacity_factor) / config.n_experts
    capacity = -(-some.sum() * share.numerator // share.denominator)  # rounded up
    dropped = (_places(expert, weight, config) >= capacity) & some
    left = torch.where(dropped, 0, weight)
    if config.renormalize:
        nothing = torch.zeros(n_tokens, device=weight.device)
        # on GPUs too always in one order, unlike index_add
        before, after = (nothing.index_put((assignments.token,), one, accumulate=True) for one in (weight, left))
        left = left * (before / torch.where(after > 0, after, 1))[assignments.token]
    kept = attrs.evolve(
        assignments, expert=torch.where(dropped, config.n_experts, expert), weight=left, some_to_none=True
    )
    return kept, count_by_expert(expert, config.n_experts) - count_by_expert(kept.expert, config.n_experts)


def _places(expert: torch.Tensor, weight: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Where each assignment stands in the queue of its expert, from 0, ``(A,)``."""
    if config.drop == "weight":
        first = weight.detach().argsort(descending=True, stable=True)
        order = first[expert[first].argsort(stable=True)]
    else:
        order = expert.argsort(stable=True)
    counts = count_by_expert(expert, config.n_experts)
    starts = torch.cat([counts.cumsum(0) - counts, counts.sum().reshape(1)])
    in_queue = torch.arange(len(order), device=order.device) - starts[expert[order]]
    return torch.empty_like(order).scatter_(0, order, in_queue)
