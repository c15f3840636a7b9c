"""The bias that keeps experts equally busy by taking part in the choice of experts, and in nothing else.

Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664), algorithm 1.
"""

from __future__ import annotations

import math

import torch

from forge_plugins_moe.router_config import TopKConfig


def bias_move(load: torch.Tensor, rate: float, *, center: bool) -> torch.Tensor:
    """By how much each bias changes: ``rate · sign(mean(c) − c_i)``, less its mean with ``center``.

    Args:
        load: ``(E,)``, assignments to each expert in a step, over all ranks.
    """
    # counts as large as fp32 takes them have a mean that it rounds; MPS has nothing wider
    load = load if load.device.type == "mps" else load.double()
    move = rate * (load.mean() - load).sign().float()
    return move - move.mean() if center else move


def rate_at(progress: float, config: TopKConfig) -> float:
    """How much a bias moves in the step at ``progress``, the step over the run's last one."""
    rate = config.bias_rate or 0.0
    if progress > config.bias_frozen_from:
        return 0.0
    if config.bias_schedule == "cosine_decay":
        return rate * 0.5 * (1 + math.cos(math.pi * progress / config.bias_frozen_from))
    if config.bias_schedule == "linear_warmup":
        return rate * min(1.0, progress / config.bias_warmup)
    return rate
