"""Weights of targets in a sum over tokens."""

from __future__ import annotations

import torch


def weighted(each: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """``each`` ``(T,)`` times ``weights``, ``(B, S)`` of the same T positions; as it is without weights."""
    return each if weights is None else each * weights.flatten()
