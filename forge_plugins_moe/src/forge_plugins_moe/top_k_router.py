"""A base for routers of one's own: a subclass says how well each expert suits each token, the rest is done."""

from __future__ import annotations

from typing import Annotated

import torch
from attrs.validators import ge
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.contracts.router import Routing
from forge_core.errors import ConfigError
from forge_plugins_dense.initial_values import normal
from forge_plugins_moe.routers.assignments import token_choice
from forge_plugins_moe.routers.gated_router import masked_logits


class TopKRouter(nn.Module):
    """Each token goes to the ``top_k`` experts with the highest scores, which are its weights.

    It has a linear gate, whose initial values come from the run's seed. Padding goes to no expert.

    Args:
        dim: Width of the hidden states.
        n_experts: Experts of the layer.
        top_k: Experts a token visits.

    Raises:
        ConfigError: ``top_k`` is above ``n_experts``.
    """

    def __init__(self, *, dim: int, n_experts: int, top_k: Annotated[int, ge(1)] = 2) -> None:
        super().__init__()
        if top_k > n_experts:
            raise ConfigError(f"router.top_k = {top_k} is more than the {n_experts} experts of the layer")
        self.n_experts = n_experts
        self.top_k = self.experts_per_token = top_k
        self.gate = nn.Linear(dim, n_experts, bias=False)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden: ``(T, D)``.

        Returns:
            ``(T, E)`` fp32. By default, the sigmoid of ``logits``.
        """
        return self.logits(hidden).sigmoid()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``hidden · gateᵀ``, ``(T, E)`` in fp32, in every precision."""
        return masked_logits(hidden, self.gate.weight, None)

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        if valid is not None:  # what stands in padding reaches neither scores nor gradients
            hidden = torch.where(valid[:, None], hidden, 0.0)
        scores = self.scores(hidden)
        chosen = scores.detach().topk(self.top_k, dim=-1).indices
        return token_choice(chosen, scores.gather(1, chosen), self.n_experts, valid)

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        rng.fill(f"{prefix}gate.weight", self.gate.weight, normal(std))
