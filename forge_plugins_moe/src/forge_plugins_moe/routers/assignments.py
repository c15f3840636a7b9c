"""From each token's choice of experts to a ``Routing``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge_core.contracts.router import Routing


def token_choice(
    chosen: torch.Tensor,
    weight: torch.Tensor,
    n_experts: int,
    valid: torch.Tensor | None,
    auxiliary: Mapping[str, torch.Tensor] | None = None,
) -> Routing:
    """K assignments a token; those of padding go to no expert.

    Args:
        chosen: ``(T, K)`` int64, experts.
        weight: ``(T, K)`` fp32.
        valid: ``(T,)`` bool; ``None``: all.
    """
    if valid is not None:
        chosen = torch.where(valid[:, None], chosen, n_experts)
        weight = torch.where(valid[:, None], weight, 0.0)
    token = torch.arange(len(chosen), device=chosen.device)[:, None].expand_as(chosen)
    return Routing(token.flatten(), chosen.flatten(), weight.flatten(), auxiliary or {}, {}, top_k=chosen.shape[1])


def as_mask(chosen: torch.Tensor, n_experts: int, valid: torch.Tensor | None) -> torch.Tensor:
    """``(T, E)`` fp32, 1 where a valid token has chosen the expert; its sum over tokens is the load.

    Args:
        chosen: ``(T, K)`` int64, experts.
        valid: ``(T,)`` bool; ``None``: all.
    """
    mask = torch.zeros(len(chosen), n_experts, device=chosen.device)
    ones = torch.ones((), device=chosen.device) if valid is None else valid[:, None].float()
    return mask.scatter(1, chosen, ones.expand(chosen.shape))
