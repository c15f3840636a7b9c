"""Experts that every token visits."""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ShardRole
from forge_plugins_dense.feed_forward import MLP
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.initial_values import normal


class SharedExperts(MLP):
    """``n`` experts without a router are one layer of ``n`` times the width (Dai et al. 2024, arXiv 2401.06066).

    With ``gated``, what it gives is multiplied by ``σ(x · w)`` (Qwen2-MoE): inside, before the last product, so that it
    is the same however the layer is cut.
    """

    def __init__(self, config: MLPConfig, *, dim: int, gated: bool, build: Builder) -> None:
        super().__init__(config, dim=dim, build=build)
        self.share = nn.Linear(dim, 1, bias=False) if gated else None

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        if self.share is None:
            return super().forward(hidden, valid)
        share = self.share(hidden).sigmoid()
        output: torch.Tensor = self.down(self.raised(hidden) * share)
        return output

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        super().init_weights(rng, prefix, residual_std, std)
        if self.share is not None:
            rng.fill(f"{prefix}share.weight", self.share.weight, normal(std))

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan = super().parallel_plan()
        return plan if self.share is None else {**plan, "share": "router"}
