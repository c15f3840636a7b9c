"""ReLU routing with a sparsity that is held by a loss."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.contracts.router import Routing
from forge_core.ops.accumulate import accumulate
from relu_router.config import ReluRouterConfig


class ReluRouter(nn.Module):
    """Each token goes to the experts whose score is above zero, which is also its weight: no choice has to be
    differentiated.

    Wang, Zhu and Chen, "ReMoE: Fully Differentiable Mixture-of-Experts with ReLU Routing"
    (https://arxiv.org/abs/2412.14711), with the balanced form of the sparsity loss: the score of an expert counts as
    much as it is visited more than others. The coefficient of the loss is multiplied or divided by ``growth`` after
    each step. Two things differ: each layer has a coefficient of its own, where the paper has one for all; and what is
    visited is counted over the step before, on all ranks, so that the loss does not depend on how a step is cut.

    It reports ``router_visits``, the mean number of experts a token visits, and ``router_penalty``, the coefficient.
    """

    def __init__(self, config: ReluRouterConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        super().__init__()
        self.config, self.n_experts = config, n_experts
        self.experts_per_token = config.experts_per_token  # by which FLOPs are counted
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.register_buffer("penalty", torch.empty(1))  # saved with the model
        self.register_buffer("popularity", torch.empty(n_experts))  # 1: visited as often as is wanted of it
        self.register_buffer("visits", torch.empty(n_experts + 1), persistent=False)  # of each; last, tokens
        self.register_buffer("last_visits", torch.empty(1), persistent=False)

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        score = F.linear(hidden.float(), self.gate.weight.float()).relu()  # fp32, whatever the model computes in
        if valid is None:
            valid = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        score = torch.where(valid[:, None], score, 0.0)  # (tokens, experts)
        visited = score > 0
        counts = torch.cat([visited.sum(0, dtype=torch.float32), valid.sum(dtype=torch.float32)[None]])
        weight = accumulate(score, self.visits, counts)

        place = torch.arange(self.n_experts, device=hidden.device)
        expert = torch.where(visited, place, self.n_experts)  # to none; to leave them out, the host would have to wait
        token = torch.arange(len(hidden), device=hidden.device).repeat_interleave(self.n_experts)
        sparsity = (self.penalty * self.popularity * score).sum()  # equation 9, times the number of tokens
        return Routing(token, expert.flatten(), weight.flatten(), {"sparsity": sparsity}, metrics={})

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        return {"visits": self.visits}

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        visits, tokens = reduced["visits"][:-1], reduced["visits"][-1].clamp(min=1)
        wanted = self.config.experts_per_token
        self.last_visits.copy_(visits.sum()[None] / tokens)
        self.penalty.mul_(self.config.growth ** torch.sign(self.last_visits - wanted))
        self.popularity.copy_(visits * self.n_experts / (wanted * tokens))

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        return {"router_visits": self.last_visits[0], "router_penalty": self.penalty[0]}

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        rng.fill(f"{prefix}gate.weight", self.gate.weight, lambda full, g: full.normal_(0, std, generator=g))
        rng.fill(f"{prefix}penalty", self.penalty, lambda full, _: full.fill_(self.config.first_penalty))
        rng.fill(f"{prefix}popularity", self.popularity, lambda full, _: full.fill_(1.0))
        for name in ("visits", "last_visits"):
            rng.fill(f"{prefix}{name}", self.get_buffer(name), lambda full, _: full.zero_())
