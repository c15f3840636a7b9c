"""Attention sinks: heads that need not attend to anything (gpt-oss; Xiao et al. 2023, arXiv 2309.17453).

Shapes: B = batch, S = sequence, H = query heads, T = keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

_MORE = 8
"""Features more, of which one is used: kernels want multiples of 16 bytes."""


class Sinks(nn.Module):
    """A learned logit of each head, which takes part in its softmax and has no value."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.out_features = n_heads
        self.bias = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> torch.Tensor:
        """``(H,)``; under tensor parallelism, of this rank's heads."""
        return self.bias


def beside_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What attention without sinks, scaled by ``1 / √head_dim``, gives the same for.

    There is a key more, the first, which all queries see and whose value is 0. Heads share keys, so that its logit is
    in a further feature of queries, which other keys do not have. In causal order it has a query of its own.

    Args:
        q, k, v, mask, causal: as for ``attend``.
        sinks: ``(H,)``.

    Returns:
        ``q``, ``k``, ``v`` and ``mask``.
    """
    batch, heads, positions, size = q.shape
    logit = (sinks.float() * math.sqrt(size)).to(q.dtype)  # which the kernel scales back
    of_queries = F.pad(logit.view(-1, 1, 1), (0, _MORE - 1)).expand(batch, heads, positions, _MORE)
    of_key = F.pad(k.new_ones(1), (size, _MORE - 1)).expand(batch, k.shape[1], 1, -1)
    q = torch.cat((q, of_queries), dim=-1)
    k = torch.cat((of_key, F.pad(k, (0, _MORE))), dim=2)
    v = F.pad(v, (0, _MORE, 1, 0))
    if causal:
        return F.pad(q, (0, 0, 1, 0)), k, v, mask
    return q, k, v, None if mask is None else F.pad(mask, (1, 0), value=True)


def rescale(mixed: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What attention without sinks gives, as if they had taken part.

    Args:
        mixed: ``(B, H, S, head_dim)``.
        logsumexp: ``(B, H, S)`` fp32, of the logits of each query.
        sinks: ``(H,)``.
    """
    share = torch.sigmoid(logsumexp - sinks.float().view(-1, 1))
    return mixed * share.unsqueeze(-1).to(mixed.dtype)
