"""The output projection."""

from __future__ import annotations

import torch
from torch import nn


class CappedHead(nn.Linear):
    """A head whose logits become ``cap · tanh(logits / cap)``, in fp32 inside (Gemma 2)."""

    def __init__(self, dim: int, vocab_size: int, cap: float) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.cap = cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, V)``."""
        logits = super().forward(hidden)
        return (self.cap * torch.tanh(logits.float() / self.cap)).to(logits.dtype)


def make_head(dim: int, vocab_size: int, cap: float | None) -> nn.Linear:
    """A head without bias."""
    return nn.Linear(dim, vocab_size, bias=False) if cap is None else CappedHead(dim, vocab_size, cap)
