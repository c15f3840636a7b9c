"""Limiting a token's experts to few groups, such as those on one node each (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

import torch

from forge_plugins_moe.router_config import GroupScore


def limit_to_groups(choice: torch.Tensor, n_groups: int, kept: int, measure: GroupScore) -> torch.Tensor:
    """``choice`` ``(T, E)``, with −∞ outside of each token's ``kept`` best groups.

    (With 0 in the place of −∞, a group that was left out is chosen after all where scores with their bias are below 0.)
    """
    grouped = choice.view(len(choice), n_groups, choice.shape[1] // n_groups)
    quality = grouped.amax(-1) if measure == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = quality.topk(kept, dim=-1).indices
    is_kept = torch.zeros_like(quality, dtype=torch.bool).scatter(1, best, True)
    return torch.where(is_kept[:, :, None], grouped, -torch.inf).flatten(1)
