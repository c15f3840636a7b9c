"""The router ``expert_choice``: experts choose tokens."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer
from forge_core.contracts.router import Routing
from forge_core.ops.accumulate import accumulate
from forge_core.ops.sequence_sum import sum_by_sequence
from forge_plugins_dense.dropout import uniform
from forge_plugins_dense.initial_values import normal, zeros
from forge_plugins_moe.exact_share import exact_share
from forge_plugins_moe.router_config import ExpertChoiceConfig
from forge_plugins_moe.routers.gated_router import GatedRouter, masked_logits
from forge_plugins_moe.routers.refusal import refuse_contradictions
from forge_plugins_moe.routers.scores import probabilities, score


class ExpertChoice(GatedRouter):
    """Each expert takes the ``n · c / E`` tokens of a group that score highest with it, rounded down, with their scores
    as weights; the load is even by construction (Zhou et al. 2022, arXiv 2202.09368, section 3.2). It also reports
    ``router_passed_over``, the fraction of tokens that no expert takes: all those of a group of less than ``E / c``.

    Whether a token is taken depends on later ones, so the model cannot generate text with it, and a loss that is
    evaluated with it looks ahead. A predictor stands in for the choice in both: a second gate, trained to tell from the
    token alone whether an expert takes it (Raposo et al. 2024, arXiv 2404.02258, section 3.5; Lin et al. 2024,
    arXiv 2407.21770); its gradient stops at the hidden state. Where there is noise, it predicts the choice with it.

    Raises:
        ConfigError: a token cannot visit as many experts as the config says.
    """

    taken: torch.Tensor
    last_taken: torch.Tensor

    def __init__(self, config: ExpertChoiceConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        refuse_contradictions(config, n_experts)
        super().__init__(dim=dim, n_experts=n_experts, experts_per_token=config.experts_per_token)
        self.config = config
        of_group = {"sequence"} if config.scope == "sequence" else set()
        self.needs = frozenset(of_group | ({"noise"} if config.gumbel_noise else set()))
        self.predictor = nn.Linear(dim, n_experts, bias=False) if config.predictor else None
        self.register_buffer("taken", torch.empty(1), persistent=False)
        self.register_buffer("last_taken", torch.empty(1), persistent=False)

    @property
    def causal(self) -> bool:
        return self.predictor is not None and not self.training

    def forward(
        self,
        hidden: torch.Tensor,
        valid: torch.Tensor | None = None,
        *,
        sequence: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> Routing:
        if self.predictor is not None and not self.training:
            return self.predicted(hidden, valid)
        logits = self.logits(hidden, valid)
        if self.config.gumbel_noise and self.training:
            assert noise is not None, "the router says that it needs it"
            scores = score(logits + gumbel_difference(noise, self.n_experts), self.config.score_function)
        else:
            scores = score(logits, self.config.score_function)
        takes = self.takes(scores.detach(), valid, sequence)
        routed = takes.float()
        probability = probabilities(scores, self.config.score_function)
        scores = self.measure(scores, probability, logits, routed, valid)
        if self.training:
            taken = takes.any(1).sum(dtype=torch.float32).reshape(1)
            scores = accumulate(scores, self.taken, taken)
        auxiliary = {}
        if self.predictor is not None:
            predicted = masked_logits(hidden.detach(), self.predictor.weight, valid)
            by_token = F.binary_cross_entropy_with_logits(predicted, routed, reduction="none").mean(-1)
            auxiliary["expert_prediction"] = (by_token if valid is None else by_token * valid).sum()
        rows = int(len(hidden) * self._share)
        return by_expert(takes, scores, rows, auxiliary)

    def predicted(self, hidden: torch.Tensor, valid: torch.Tensor | None) -> Routing:
        """Each token goes to the experts of which the predictor says that they would take it, in any number."""
        assert self.predictor is not None, "without one, nothing is predicted"
        scores = score(self.logits(hidden, valid), self.config.score_function)
        takes = masked_logits(hidden, self.predictor.weight, valid) > 0  # more likely than not; never padding, with 0
        return by_expert(takes, scores, len(hidden), {})

    def inference_router(self) -> PredictedChoice | None:
        """A router that can generate text, made of this one's parameters."""
        return None if self.predictor is None else PredictedChoice(self)

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        return {**super().accumulators(), "taken": self.taken}

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        super().before_optimizer_step(reduced, progress)
        self.last_taken.copy_(reduced["taken"])

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        tokens = self.last_sums[0]
        return {**super().step_metrics(), "router_passed_over": (tokens - self.last_taken[0]) / tokens}

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        super().init_weights(rng, prefix, std)
        for name in ("taken", "last_taken"):
            rng.fill(f"{prefix}{name}", self.get_buffer(name), zeros)
        if self.predictor is not None:
            rng.fill(f"{prefix}predictor.weight", self.predictor.weight, normal(std))

    @property
    def _share(self) -> Fraction:
        """Of a group's tokens, what an expert takes; exact, so that what groups take is never more than all may."""
        return exact_share(self.config.experts_per_token) / self.n_experts

    def takes(self, scores: torch.Tensor, valid: torch.Tensor | None, sequence: torch.Tensor | None) -> torch.Tensor:
        """``(T, E)`` bool: which tokens each expert takes."""
        if valid is None:
            valid = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        if self.config.scope == "batch":
            tokens, group = valid.sum(), torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        else:
            assert sequence is not None, "the router says that it needs it"
            tokens, group = sum_by_sequence(valid[:, None], sequence).long(), sequence
        room = tokens * self._share.numerator // self._share.denominator
        return (ranks_in_group(torch.where(valid[:, None], scores, -torch.inf), group) < room) & valid[:, None]


def gumbel_difference(noise: torch.Tensor, n_experts: int) -> torch.Tensor:
    """``G′ − G″`` ``(T, E)`` fp32 of two independent draws of Gumbel's distribution: a draw of the logistic one,
    ``log u − log(1 − u)`` (Lin et al. 2024, arXiv 2407.21770).

    Args:
        noise: ``(T,)`` int64, a number of each token in this layer.
    """
    return uniform(noise, n_experts).logit()


class PredictedChoice(nn.Module):
    """``ExpertChoice.predicted``, in training mode, too."""

    causal = True

    def __init__(self, router: ExpertChoice) -> None:
        super().__init__()
        self.router = router
        self.experts_per_token = router.experts_per_token

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        return self.router.predicted(hidden, valid)

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        self.router.init_weights(rng, f"{prefix}router.", std)


def ranks_in_group(scores: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """``(T, E)`` int64: how many tokens of a token's group score higher with each expert; equal ones in their order.

    Args:
        scores: ``(T, E)``.
        group: ``(T,)`` int64.
    """
    by_score = scores.argsort(dim=0, descending=True, stable=True)
    order = by_score.gather(0, group[by_score].argsort(dim=0, stable=True))
    place = torch.arange(len(scores), device=scores.device)
    in_order = group.sort().values  # of which group the token at each place is, for all experts the same
    start = torch.searchsorted(in_order, in_order)
    return torch.empty_like(order).scatter_(0, order, (place - start)[:, None].expand_as(order))


def by_expert(takes: torch.Tensor, scores: torch.Tensor, rows: int, auxiliary: dict[str, torch.Tensor]) -> Routing:
    """``rows`` assignments an expert, so that their number does not depend on data; those it has no use for go to none.

    Args:
        takes: ``(T, E)`` bool, at most ``rows`` true of each expert.
        scores: ``(T, E)`` fp32, the weights.
    """
    n_experts = takes.shape[1]
    token = takes.long().argsort(dim=0, descending=True, stable=True)[:rows]  # (rows, E), the ones that it takes first
    taken = takes.gather(0, token)
    expert = torch.where(taken, torch.arange(n_experts, device=takes.device), n_experts)
    weight = torch.where(taken, scores.gather(0, token), 0.0)
    return Routing(token.T.flatten(), expert.T.flatten(), weight.T.flatten(), auxiliary, {})
