"""The router ``hash``: a token's id decides."""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.contracts.router import Routing
from forge_plugins_moe.router_config import HashConfig
from forge_plugins_moe.routers.assignments import as_mask, token_choice
from forge_plugins_moe.routers.expert_table import ExpertTable
from forge_plugins_moe.routers.gated_router import GatedRouter
from forge_plugins_moe.routers.refusal import refuse_contradictions
from forge_plugins_moe.routers.scores import normalized, probabilities, score

_NEEDS = frozenset({"token_ids"})


def hash_router(config: HashConfig, /, *, dim: int, n_experts: int, **_: object) -> nn.Module:
    """The experts of a token are the ones that a fixed table has for its id (Roller et al. 2021, arXiv 2106.04426).

    Raises:
        ConfigError: there are fewer experts than ``top_k``, or the file cannot be used.
    """
    refuse_contradictions(config, n_experts)
    if config.weights == "gate":
        return GatedHash(config, dim=dim, n_experts=n_experts)
    return Hash(config, n_experts=n_experts)


class Hash(nn.Module):
    """Each expert of a token has the weight 1 / K. There is nothing to learn."""

    needs = _NEEDS

    def __init__(self, config: HashConfig, *, n_experts: int) -> None:
        super().__init__()
        self.n_experts, self.experts_per_token = n_experts, config.top_k
        self.table = ExpertTable(config, n_experts)

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None, *, token_ids: torch.Tensor) -> Routing:
        chosen = self.table(token_ids)
        weight = torch.full(chosen.shape, 1 / self.experts_per_token, device=hidden.device)
        return token_choice(chosen, weight, self.n_experts, valid)

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        self.table.init_weights(rng, f"{prefix}table.")


class GatedHash(GatedRouter):
    """A learned gate weighs the experts of a token, without a say in which they are: ``w = s / Σ s · scale`` (the first
    layers of DeepSeek-V4)."""

    needs = _NEEDS

    def __init__(self, config: HashConfig, *, dim: int, n_experts: int) -> None:
        super().__init__(dim=dim, n_experts=n_experts, experts_per_token=config.top_k)
        self.config = config
        self.table = ExpertTable(config, n_experts)

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None, *, token_ids: torch.Tensor) -> Routing:
        logits = self.logits(hidden, valid)
        scores = score(logits, self.config.score_function)
        chosen = self.table(token_ids)
        weight = self.config.route_scale * normalized(scores.gather(1, chosen))
        routed = as_mask(chosen, self.n_experts, valid)
        probability = probabilities(scores, self.config.score_function)
        weight = self.measure(weight, probability, logits, routed, valid)
        return token_choice(chosen, weight, self.n_experts, valid)

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        super().init_weights(rng, prefix, std)
        self.table.init_weights(rng, f"{prefix}table.")
