"""The common part of ``softmax_topk`` and ``sigmoid_topk``: scores choose, a bias may take part, a loss may balance."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from forge_core.contracts.model import Initializer, canonical_name
from forge_core.contracts.router import Routing
from forge_core.ops.accumulate import accumulate
from forge_core.ops.sequence_sum import sum_by_sequence
from forge_plugins_dense.initial_values import zeros
from forge_plugins_moe.router_config import ScoreFunction, TopKConfig
from forge_plugins_moe.routers.assignments import as_mask, token_choice
from forge_plugins_moe.routers.gated_router import GatedRouter
from forge_plugins_moe.routers.groups import limit_to_groups
from forge_plugins_moe.routers.loss import load_balance
from forge_plugins_moe.routers.refusal import refuse_contradictions
from forge_plugins_moe.routers.scores import probabilities, score
from forge_plugins_moe.routers.selection_bias import bias_move, rate_at


class TopKRouter(GatedRouter):
    """Each token goes to the K experts with the highest score.

    With a ``bias`` (a persistent buffer, always fp32), those with the highest sum of score and bias; weights come from
    the scores alone. It moves once a step, from the load over all ranks, and so not in evaluation. It reports
    ``router_bias_min``, ``router_bias_max`` and ``router_bias_std``.

    With the scope ``global_batch``, the loss takes what fraction of the load each expert had in the step before
    (``load_share``, a persistent buffer, at first all equal). Qiu et al. 2025 (arXiv 2501.11873) sum the counts of the
    same step over ranks, and where a step has several microbatches, over those so far, so that the gradient depends on
    how it is cut. A step later, the counts are those of all of them. While the router is frozen, ``load_share`` is,
    too: it tells of other tokens, and would push what comes before the router by them. The loss is 0 then.

    Raises:
        ConfigError: what the config asks for cannot be with so many experts.
    """

    bias: torch.Tensor
    load: torch.Tensor
    load_share: torch.Tensor
    balance_load: torch.Tensor

    def __init__(self, config: TopKConfig, score_function: ScoreFunction, *, dim: int, n_experts: int) -> None:
        refuse_contradictions(config, n_experts)
        super().__init__(dim=dim, n_experts=n_experts, experts_per_token=config.top_k, bias=config.gate_bias)
        self.config = config
        self.score_function = score_function
        self.has_bias = config.bias_rate is not None
        if self.has_bias:
            self.register_buffer("bias", torch.empty(n_experts))
            self.register_buffer("load", torch.empty(n_experts), persistent=False)
        self.is_frozen = False
        self.balances_steps = config.balance > 0 and config.balance_scope == "global_batch"
        if self.balances_steps:
            self.register_buffer("load_share", torch.empty(n_experts))
            self.register_buffer("balance_load", torch.empty(n_experts), persistent=False)
        self.needs = frozenset({"sequence"} if config.balance > 0 and config.balance_scope == "sequence" else ())

    def forward(
        self, hidden: torch.Tensor, valid: torch.Tensor | None = None, *, sequence: torch.Tensor | None = None
    ) -> Routing:
        logits = self.logits(hidden, valid)
        scores = score(logits, self.score_function)
        chosen = self._choose(scores.detach())
        weight = self._weigh(scores.gather(1, chosen), logits.gather(1, chosen))
        if not self.training:
            return token_choice(chosen, weight, self.n_experts, valid)

        routed = as_mask(chosen, self.n_experts, valid)
        probability = probabilities(scores, self.score_function)
        if self.has_bias:
            weight = accumulate(weight, self.load, routed.sum(0))
        auxiliary = self.z_losses(logits, valid, self.config.z_loss)
        if self.config.balance > 0:
            counted = self._counted(scores.detach(), routed, valid)
            if self.balances_steps:
                weight = accumulate(weight, self.balance_load, counted.sum(0))
            value = load_balance(probability, self._balanced_load(counted, sequence), valid)
            is_of_now = not (self.balances_steps and self.is_frozen)
            auxiliary["load_balance"] = (self.config.balance if is_of_now else 0.0) * value
        weight = self.measure(weight, probability, logits, routed, valid)
        return token_choice(chosen, weight, self.n_experts, valid, auxiliary)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """``(T, K)`` int64."""
        config = self.config
        choice = scores + self.bias if self.has_bias else scores
        if config.groups_per_token is not None:
            choice = limit_to_groups(choice, config.n_groups, config.groups_per_token, config.group_score)
        return choice.topk(config.top_k, dim=-1).indices

    def _weigh(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Weights of the chosen experts, of their scores and logits; all are ``(T, K)``."""
        raise NotImplementedError

    def _counted(self, scores: torch.Tensor, routed: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Which choices the balance loss counts, ``(T, E)`` fp32."""
        config = self.config
        goes_by_scores = not self.has_bias and config.groups_per_token is None
        if config.balance_counts == "routed" or goes_by_scores:
            return routed
        return as_mask(scores.topk(config.top_k, dim=-1).indices, self.n_experts, valid)

    def _balanced_load(self, counted: torch.Tensor, sequence: torch.Tensor | None) -> torch.Tensor:
        """The load among the tokens that each is balanced with, ``(E,)`` or ``(T, E)``."""
        if self.config.balance_scope == "microbatch":
            return counted.sum(0)
        if self.config.balance_scope == "sequence":
            assert sequence is not None, "the router says that it needs it"
            return sum_by_sequence(counted, sequence)
        return self.load_share

    def set_frozen(self, names: Collection[str]) -> None:
        """Learn which of its parameters are not trained from now on."""
        self.is_frozen = all(canonical_name(name) in names for name, _ in self.named_parameters())

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        accumulators = dict(super().accumulators())
        if self.has_bias:
            accumulators["load"] = self.load
        if self.balances_steps:
            accumulators["balance_load"] = self.balance_load
        return accumulators

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        super().before_optimizer_step(reduced, progress)
        if self.has_bias:
            rate = rate_at(progress, self.config)
            self.bias += bias_move(reduced["load"], rate, center=self.config.bias_center)
        if self.balances_steps:
            load = reduced["balance_load"]
            share = load / load.sum().clamp(min=1)
            self.load_share.copy_(torch.where(load.sum() > 0, share, self.load_share))

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        metrics = dict(super().step_metrics())
        if self.has_bias:
            metrics["router_bias_min"] = self.bias.min()
            metrics["router_bias_max"] = self.bias.max()
            metrics["router_bias_std"] = self.bias.std(correction=0)
        return metrics

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        super().init_weights(rng, prefix, std)
        for name in ("bias", "load", "balance_load"):
            if name in self._buffers:
                rng.fill(f"{prefix}{name}", self.get_buffer(name), zeros)
        if self.balances_steps:
            rng.fill(f"{prefix}load_share", self.load_share, lambda full, _: full.fill_(1 / self.n_experts))
