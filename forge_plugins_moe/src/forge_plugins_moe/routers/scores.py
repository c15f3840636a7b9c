"""From logits to scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forge_plugins_moe.router_config import ScoreFunction


def score(logits: torch.Tensor, function: ScoreFunction) -> torch.Tensor:
    """``(T, E)`` fp32 to ``(T, E)`` fp32, above 0. ``sqrtsoftplus`` is √softplus (DeepSeek-V4)."""
    if function == "softmax":
        return logits.softmax(-1)
    if function == "sigmoid":
        return logits.sigmoid()
    # far below 0, softplus is 0, where the root has an infinite slope
    return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


def probabilities(scores: torch.Tensor, function: ScoreFunction) -> torch.Tensor:
    """Scores that sum to 1 over the experts (DeepSeek-V3, arXiv 2412.19437, equation 19)."""
    return scores if function == "softmax" else normalized(scores)


def normalized(scores: torch.Tensor) -> torch.Tensor:
    """Divided by their sum over the last dimension."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)
