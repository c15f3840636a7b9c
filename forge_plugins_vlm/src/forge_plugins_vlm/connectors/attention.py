"""Attention of queries to media."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.errors import ConfigError
from forge_plugins_vlm.initial_values import init_layer


class MediaAttention(nn.Module):
    """Attention with several heads, in the width of what it reads.

    Raises:
        ConfigError: the heads do not share out that width evenly.
    """

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        if dim % n_heads:
            raise ConfigError(
                f"model.connector.n_heads = {n_heads} does not divide the width {dim} of the encoder's features"
            )
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, queries: torch.Tensor, media: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Attend.

        Args:
            queries: ``(N, Q, D)``.
            media: ``(N, T, D)``.
            visible: ``(N, T)`` bool; ``None``: all of it.

        Returns:
            ``(N, Q, D)``.
        """
        q, k, v = (
            projected.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projected in (self.q(queries), self.k(media), self.v(media))
        )
        mask = None if visible is None else visible[:, None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        attended: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return attended

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill every parameter."""
        for name in ("q", "k", "v", "o"):
            init_layer(getattr(self, name), rng, f"{prefix}{name}.")
