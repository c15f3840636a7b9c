"""The router ``noisy_topk``: learned noise decides which experts a token tries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.contracts.router import Routing
from forge_plugins_dense.initial_values import zeros
from forge_plugins_moe.router_config import NoisyTopKConfig
from forge_plugins_moe.routers.assignments import as_mask, token_choice
from forge_plugins_moe.routers.gated_router import GatedRouter, masked_logits
from forge_plugins_moe.routers.loss import squared_variation
from forge_plugins_moe.routers.refusal import refuse_contradictions


class NoisyTopK(GatedRouter):
    """``H = x W_g + N(0, 1) · softplus(x W_n)``, and the softmax over the K largest; in evaluation without noise. Two
    losses balance it over the microbatch: the variation of the experts' sums of weights (``importance``), and of their
    expected numbers of tokens (``load``) (Shazeer et al. 2017, arXiv 1701.06538, section 2.1 and appendix A).

    The noise is of PyTorch's generator, which the engine seeds in each step, so a run that continues draws the same
    one; a run on other ranks, or with other microbatches, draws another.

    Raises:
        ConfigError: what the config asks for cannot be with so many experts.
    """

    def __init__(self, config: NoisyTopKConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        refuse_contradictions(config, n_experts)
        super().__init__(dim=dim, n_experts=n_experts, experts_per_token=config.top_k)
        self.config = config
        self.noise = nn.Linear(dim, n_experts, bias=False)

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        clean = self.logits(hidden, valid)
        if not self.training:
            best = clean.topk(self.config.top_k, dim=-1)
            return token_choice(best.indices, best.values.softmax(-1), self.n_experts, valid)

        # not 0, as the chance of a choice is divided by it
        deviation = F.softplus(masked_logits(hidden, self.noise.weight, valid)).clamp_min(1e-6)
        noisy = clean + self.draw(clean) * deviation
        best = noisy.topk(self.config.top_k, dim=-1)
        weight, chosen = best.values.softmax(-1), best.indices
        routed = as_mask(chosen, self.n_experts, valid)

        auxiliary = self.z_losses(clean, valid, self.config.z_loss)
        tokens = torch.full((), len(hidden), device=hidden.device) if valid is None else valid.sum()
        if self.config.importance > 0:
            weights = torch.zeros_like(clean).scatter(1, chosen, weight) * routed
            auxiliary["importance_variation"] = self.config.importance * tokens * squared_variation(weights.sum(0))
        if self.config.load > 0:
            expected = chance_of_choice(clean, noisy, deviation, self.config.top_k)
            by_expert = (expected if valid is None else expected * valid[:, None]).sum(0)
            auxiliary["load_variation"] = self.config.load * tokens * squared_variation(by_expert)
        weight = self.measure(weight, clean.softmax(-1), clean, routed, valid)
        return token_choice(chosen, weight, self.n_experts, valid, auxiliary)

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """Standard normal noise of the shape of ``like``."""
        noise: torch.Tensor = torch.randn_like(like)
        return noise

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        super().init_weights(rng, prefix, std)
        rng.fill(f"{prefix}noise.weight", self.noise.weight, zeros)  # as much noise for all, 0.69, to begin with


def chance_of_choice(clean: torch.Tensor, noisy: torch.Tensor, deviation: torch.Tensor, top_k: int) -> torch.Tensor:
    """The chance of each expert to be among a token's K best if its own noise were drawn again, ``(T, E)``:
    ``Φ((clean_i − kth_excluding(noisy, K, i)) / deviation_i)`` (equations 8 and 9).

    Args:
        clean, noisy, deviation: ``(T, E)`` fp32: logits, those with noise, and the standard deviation of the noise.
        top_k: K, below E.
    """
    best = noisy.topk(top_k + 1, dim=-1).values
    last_in, first_out = best[:, -2:-1], best[:, -1:]
    to_beat = torch.where(noisy > first_out, first_out, last_in)
    chance: torch.Tensor = torch.special.ndtr((clean - to_beat) / deviation)
    return chance
