"""The router ``uniform``: round-robin, for benchmarks."""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.contracts.router import Routing
from forge_plugins_moe.router_config import UniformConfig
from forge_plugins_moe.routers.assignments import token_choice
from forge_plugins_moe.routers.refusal import refuse_contradictions


class Uniform(nn.Module):
    """Token ``t`` of a microbatch goes to the experts ``t · K … t · K + K − 1``, modulo E, each with the weight 1 / K.
    There is nothing to learn; it shows what a perfectly even load would cost.

    Raises:
        ConfigError: there are fewer experts than ``top_k``.
    """

    def __init__(self, config: UniformConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        refuse_contradictions(config, n_experts)
        super().__init__()
        self.n_experts, self.top_k = n_experts, config.top_k
        self.experts_per_token = config.top_k

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        chosen = (torch.arange(len(hidden) * self.top_k, device=hidden.device) % self.n_experts).view(-1, self.top_k)
        weight = torch.full(chosen.shape, 1 / self.top_k, device=hidden.device)
        return token_choice(chosen, weight, self.n_experts, valid)

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        """There is nothing to fill."""
