"""Which experts work on the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from forge_core.ops.accumulate import accumulate
from forge_plugins_moe.dispatch import Assignments
from forge_plugins_moe.feed_forward import MoE


class Coactivation:
    """Counts pairs of experts that a token visits, on this rank, while the layer is trained."""

    def __init__(self, layer: MoE, device: torch.device) -> None:
        self._layer = layer
        n_experts = layer.config.n_experts
        self.counts = torch.zeros(n_experts, n_experts, device=device)
        layer.experts.register_forward_hook(self._count)

    def fraction(self) -> torch.Tensor:
        """``(E, E)``: of the tokens of the expert of a row, the part that visits that of a column too; 0 for an expert
        without tokens."""
        own = self.counts.diagonal()
        return self.counts / own.clamp(min=1)[:, None]

    def forget(self) -> None:
        """Begin anew."""
        self.counts.zero_()

    def _count(self, _: Any, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """The output as it is, whose backward counts."""
        if not self._layer.training:
            return output
        hidden: torch.Tensor = given[0]
        assignments: Assignments = given[1]
        n_tokens, n_experts = hidden.shape[0] * hidden.shape[1], len(self.counts)
        visits = torch.zeros(n_tokens, n_experts + 1, device=hidden.device)
        visits = visits.index_put((assignments.token, assignments.expert), torch.ones((), device=hidden.device))
        visits = visits[:, :n_experts]
        return accumulate(output, self.counts, visits.T @ visits)
