"""What routers with a learned gate have in common: logits, and what they report."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.ops.accumulate import accumulate
from forge_plugins_dense.initial_values import normal, zeros
from forge_plugins_moe.routers.loss import z_loss

_SUMMED = ("tokens", "entropy", "confidence", "margin", "selected", "squared_logit")


class GatedRouter(nn.Module):
    """Base of routers whose scores are a linear function of the hidden state, computed in fp32.

    What it reports, over the tokens of a step on all ranks: ``router_entropy``, of a token's probabilities, 1 where all
    are equal; ``router_confidence``, the largest of them, and ``router_margin``, by which it is ahead of the next;
    ``router_selected``, the sum of those of the chosen experts; ``router_logit_rms``. All are NaN where no gradient has
    passed the layer.
    """

    sums: torch.Tensor
    last_sums: torch.Tensor

    def __init__(self, *, dim: int, n_experts: int, experts_per_token: float, bias: bool = False) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.experts_per_token = experts_per_token
        self.gate = nn.Linear(dim, n_experts, bias=bias)
        self.register_buffer("sums", torch.empty(len(_SUMMED)), persistent=False)
        self.register_buffer("last_sums", torch.empty(len(_SUMMED)), persistent=False)

    def logits(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """``(T, E)`` fp32 of hidden states ``(T, D)``; 0 at padding, whose gradient is then 0."""
        return masked_logits(hidden, self.gate.weight, valid, self.gate.bias)

    def z_losses(self, logits: torch.Tensor, valid: torch.Tensor | None, coefficient: float) -> dict[str, torch.Tensor]:
        """The router z-loss as an auxiliary loss, if it is wanted."""
        if coefficient == 0 or not self.training:
            return {}
        return {"router_z": coefficient * z_loss(logits, valid)}

    def measure(
        self,
        weight: torch.Tensor,
        probability: torch.Tensor,
        logits: torch.Tensor,
        routed: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """``weight``, whose backward adds to what the router reports.

        Args:
            weight: of any shape, on the way to the loss.
            probability: ``(T, E)`` fp32, 1 in sum.
            logits: ``(T, E)`` fp32.
            routed: ``(T, E)`` fp32, 1 where a valid token goes to the expert.
            valid: ``(T,)`` bool; ``None``: all.
        """
        if not self.training:
            return weight
        with torch.no_grad():
            best, place = probability.max(-1, keepdim=True)
            next_best = probability.scatter(1, place, 0.0).amax(-1)
            logarithm = probability.clamp_min(torch.finfo(probability.dtype).tiny).log()
            by_token = torch.stack(
                [
                    torch.ones_like(next_best),
                    -(probability * logarithm).sum(-1),
                    best.squeeze(-1),
                    best.squeeze(-1) - next_best,
                    (probability * routed).sum(-1),
                    logits.square().mean(-1),
                ]
            )
            sums = (by_token if valid is None else by_token * valid).sum(-1)
        return accumulate(weight, self.sums, sums)

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        return {"sums": self.sums}

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        self.last_sums.copy_(reduced["sums"])

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        mean = {name: total / self.last_sums[0] for name, total in zip(_SUMMED, self.last_sums, strict=True)}
        return {
            "router_entropy": mean["entropy"] / max(math.log(self.n_experts), 1e-9),
            "router_confidence": mean["confidence"],
            "router_margin": mean["margin"],
            "router_selected": mean["selected"],
            "router_logit_rms": mean["squared_logit"].sqrt(),
        }

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        rng.fill(f"{prefix}gate.weight", self.gate.weight, normal(std))
        if self.gate.bias is not None:
            rng.fill(f"{prefix}gate.bias", self.gate.bias, zeros)
        for name in ("sums", "last_sums"):
            rng.fill(f"{prefix}{name}", self.get_buffer(name), zeros)


def masked_logits(
    hidden: torch.Tensor, weight: torch.Tensor, valid: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``hidden · weightᵀ + bias`` in fp32, 0 at padding."""
    logits = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    return logits if valid is None else torch.where(valid[:, None], logits, 0.0)
