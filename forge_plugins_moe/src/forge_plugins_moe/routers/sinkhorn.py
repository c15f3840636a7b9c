"""The router ``sinkhorn``: in training, the experts of a balanced assignment of the microbatch's tokens."""

from __future__ import annotations

import math

import torch

from forge_core.contracts.router import Routing
from forge_plugins_moe.router_config import SinkhornConfig
from forge_plugins_moe.routers.assignments import as_mask, token_choice
from forge_plugins_moe.routers.gated_router import GatedRouter
from forge_plugins_moe.routers.refusal import refuse_contradictions
from forge_plugins_moe.routers.scores import probabilities, score


class Sinkhorn(GatedRouter):
    """``exp(ℓ)`` is scaled by rows and columns until rows sum to 1 / T and columns to 1 / E, and each token goes to the
    K largest of its row; in evaluation, to the K largest logits. Weights are scores of the logits alone (Clark et al.
    2022, arXiv 2202.01169, section 4; Lewis et al. 2021, arXiv 2103.16716; Megatron-LM).

    In training a token's experts depend on the other tokens of its microbatch on its rank.

    Raises:
        ConfigError: what the config asks for cannot be with so many experts.
    """

    def __init__(self, config: SinkhornConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        refuse_contradictions(config, n_experts)
        super().__init__(dim=dim, n_experts=n_experts, experts_per_token=config.top_k)
        self.config = config

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        config = self.config
        logits = self.logits(hidden, valid)
        scores = score(logits, config.score_function)
        choice = log_plan(logits.detach(), valid, config.iterations) if self.training else logits
        chosen = choice.topk(config.top_k, dim=-1).indices
        probability = probabilities(scores, config.score_function)
        routed = as_mask(chosen, self.n_experts, valid)
        weight = self.measure(scores.gather(1, chosen), probability, logits, routed, valid)
        return token_choice(chosen, weight, self.n_experts, valid, self.z_losses(logits, valid, config.z_loss))


def log_plan(logits: torch.Tensor, valid: torch.Tensor | None, iterations: int) -> torch.Tensor:
    """The logarithm of the balanced assignment ``(T, E)``, whose rows sum to 1 / T and columns to 1 / E, in logarithms
    throughout, as ``exp`` of a large logit is infinite. Rows of padding are −∞.

    Args:
        iterations: of rows, then columns; columns are exact after any, rows after enough.
    """
    n_tokens, n_experts = logits.shape
    tokens = torch.full((), n_tokens, device=logits.device) if valid is None else valid.sum()
    row_sum, column_sum = -tokens.clamp(min=1).log(), -math.log(n_experts)
    if valid is not None:
        logits = torch.where(valid[:, None], logits, -torch.inf)
    by_expert = logits.new_zeros(1, n_experts)
    by_token = logits.new_zeros(n_tokens, 1)
    for _ in range(iterations):
        by_token = _up_to(row_sum, (logits + by_expert).logsumexp(1, keepdim=True))
        by_expert = _up_to(column_sum, (logits + by_token).logsumexp(0, keepdim=True))
    return logits + by_token + by_expert


def _up_to(wanted: torch.Tensor | float, logsumexp: torch.Tensor) -> torch.Tensor:
    """What brings a sum to what it should be; 0 where there is nothing to sum."""
    return torch.where(logsumexp.isfinite(), wanted - logsumexp, 0.0)
