"""The router kit passes a router that keeps the contract, and has a sentence for each way to break it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.router import Routing
from forge_testing.router import RouterConformance


class BalancedRouter(nn.Module):
    """Softmax top-2 with a load-balancing loss and a selection bias, all that a router can have."""

    def __init__(self, *, dim, n_experts):
        super().__init__()
        self.n_experts = n_experts
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.register_buffer("bias", torch.empty(n_experts))
        self.register_buffer("counts", torch.empty(n_experts), persistent=False)

    def forward(self, hidden, valid=None):
        if valid is None:
            valid = hidden.new_ones(len(hidden), dtype=torch.bool)
        scores = self.gate(hidden).float().softmax(-1)
        chosen = (scores + self.bias).topk(2).indices
        token, place = valid[:, None].expand_as(chosen).nonzero(as_tuple=True)
        expert = chosen[token, place]
        share = F.one_hot(expert, self.n_experts).float().sum(0)
        if torch._C._current_graph_task_id() == -1:  # not while backward computes a checkpointed forward again
            self.counts += share
        mean_score = (scores * valid[:, None]).sum(0) / valid.sum().clamp(min=1)
        weight = scores[token, expert]
        return Routing(token, expert, weight, {"balance": (share * mean_score).sum()}, {"share": share.detach()})

    def init_weights(self, rng, prefix, std):
        rng.fill(f"{prefix}gate.weight", self.gate.weight, lambda full, g: full.normal_(0, std, generator=g))
        for name in ("bias", "counts"):
            rng.fill(f"{prefix}{name}", getattr(self, name), lambda full, g: full.zero_())

    def accumulators(self):
        return {"counts": self.counts}

    def before_optimizer_step(self, reduced, progress):
        self.bias += 0.01 * (reduced["counts"].mean() - reduced["counts"]).sign()


class TestBalancedRouter(RouterConformance):
    def make(self, **given):
        return BalancedRouter(**given)


def changed_routing(change):
    """A router whose result goes through ``change(router, hidden, valid, routing)``."""

    class Changed(BalancedRouter):
        def forward(self, hidden, valid=None):
            return change(self, hidden, valid, super().forward(hidden, valid))

    return Changed


def a_mean(router, hidden, valid, routing):
    n_valid = len(hidden) if valid is None else int(valid.sum())
    return routing._replace(auxiliary={name: value / max(n_valid, 1) for name, value in routing.auxiliary.items()})


def everything_routed(router, hidden, valid, routing):
    return BalancedRouter.forward(router, hidden)


def seen_padding(router, hidden, valid, routing):
    return routing._replace(weight=routing.weight * hidden.mean())


def counted_padding(router, hidden, valid, routing):
    return routing._replace(auxiliary={"balance": BalancedRouter.forward(router, hidden).auxiliary["balance"]})


def noisy(router, hidden, valid, routing):
    return routing._replace(weight=routing.weight * torch.rand_like(routing.weight))


def positional(router, hidden, valid, routing):
    return routing._replace(weight=routing.weight * torch.arange(1, len(routing.weight) + 1))


def detached(router, hidden, valid, routing):
    return routing._replace(weight=routing.weight.detach(), auxiliary={})


def learning_in_forward(router, hidden, valid, routing):
    router.bias += 0.1
    return routing


def overwriting(router, hidden, valid, routing):
    router.counts.copy_(routing.metrics["share"])
    return routing


def recounting(router, hidden, valid, routing):
    if torch._C._current_graph_task_id() != -1:
        router.counts += routing.metrics["share"]
    return routing


class ForgetfulInit(BalancedRouter):
    def init_weights(self, rng, prefix, std):
        rng.fill(f"{prefix}gate.weight", self.gate.weight, lambda full, g: full.normal_(0, std, generator=g))


class GlobalInit(BalancedRouter):
    def init_weights(self, rng, prefix, std):
        super().init_weights(rng, prefix, std)
        nn.init.normal_(self.gate.weight, std=std)


class NoStep(BalancedRouter):
    before_optimizer_step = property()  # hasattr is false


class ResettingStep(BalancedRouter):
    def before_optimizer_step(self, reduced, progress):
        self.counts.zero_()


class InfiniteStep(BalancedRouter):
    def before_optimizer_step(self, reduced, progress):
        self.bias /= 0


class PersistentCounts(BalancedRouter):
    def __init__(self, **given):
        super().__init__(**given)
        self.register_buffer("counts", torch.empty(self.n_experts))


class Curious(BalancedRouter):
    needs = ("sequence", "positions")


class ScalarParameter(BalancedRouter):
    def __init__(self, **given):
        super().__init__(**given)
        self.temperature = nn.Parameter(torch.empty(()))

    def init_weights(self, rng, prefix, std):
        super().init_weights(rng, prefix, std)
        rng.fill(f"{prefix}temperature", self.temperature, lambda full, g: full.fill_(1))


class LearningStep(BalancedRouter):
    def before_optimizer_step(self, reduced, progress):
        self.gate.weight.data.mul_(0.5)


class UnsavedSteps(BalancedRouter):
    """Goes differently on, some steps after a resume."""

    steps = 0

    def before_optimizer_step(self, reduced, progress):
        self.steps += 1
        self.bias.fill_(self.steps)


def reporting(value):
    class Reporting(BalancedRouter):
        def step_metrics(self):
            return {"bias": value(self)}

    return Reporting


class UnsavedBias(BalancedRouter):
    def __init__(self, **given):
        super().__init__(**given)
        self.register_buffer("bias", torch.empty(self.n_experts), persistent=False)

    def before_optimizer_step(self, reduced, progress):
        self.bias += torch.arange(self.n_experts).float()


def replaced(**fields):
    return changed_routing(
        lambda _, hidden, valid, routing: routing._replace(**{k: f(routing) for k, f in fields.items()})
    )


FAULTS = [
    (ForgetfulInit, "test_init_weights_fills_everything", (), "leaves .*bias, .*counts uninitialised"),
    (GlobalInit, "test_same_seed_same_weights", (), "gate.weight differs between two routers of one seed"),
    (
        Curious,
        "test_needs_what_can_be_known_of_a_token",
        (),
        "needs positions; it can be given token_ids, sequence, noise",
    ),
    (
        replaced(weight=lambda routing: routing.weight[:, None]),
        "test_routing_is_well_formed",
        (7, torch.float32),
        r"Routing.weight must be flat, one entry an assignment \(14,\), got \(14, 1\)",
    ),
    (
        replaced(expert=lambda routing: routing.expert + 2),
        "test_routing_is_well_formed",
        (64, torch.float32),
        "Routing.expert must lie between 0 and 8",
    ),
    (
        replaced(token=lambda routing: routing.token.int()),
        "test_routing_is_well_formed",
        (7, torch.float32),
        "Routing.token must be int64, got torch.int32",
    ),
    (
        replaced(expert=lambda routing: routing.expert * 0),
        "test_routing_is_well_formed",
        (7, torch.float32),
        "a token is assigned to the same expert twice",
    ),
    (
        replaced(weight=lambda routing: routing.weight.bfloat16()),
        "test_routing_is_well_formed",
        (7, torch.bfloat16),
        "Routing.weight must be fp32, got torch.bfloat16",
    ),
    (
        replaced(top_k=lambda routing: 1),
        "test_routing_is_well_formed",
        (7, torch.float32),
        "with top_k = 1 Routing.token must be 0, …, 0, 1, …",
    ),
    (
        replaced(top_k=lambda routing: 2, expert=lambda routing: routing.expert + 1),
        "test_routing_is_well_formed",
        (64, torch.float32),
        "with top_k and no padding, a token is assigned to none",
    ),
    (
        replaced(expert=lambda routing: torch.full_like(routing.expert, 8)),
        "test_invalid_tokens_are_not_routed",
        (),
        "an assignment to no expert has a weight",
    ),
    (
        replaced(weight=lambda routing: routing.weight / 0),
        "test_routing_is_well_formed",
        (7, torch.float32),
        "Routing.weight has values that are not finite",
    ),
    (
        replaced(auxiliary=lambda routing: {"balance": routing.auxiliary["balance"] / len(routing.token)}),
        "test_auxiliary_and_metrics_are_tensors_of_the_right_kind",
        (0,),
        "the auxiliary loss 'balance' is nan for 0 tokens",
    ),
    (
        replaced(metrics=lambda routing: {"share": 0.5}),
        "test_auxiliary_and_metrics_are_tensors_of_the_right_kind",
        (64,),
        "the metric 'share' is a host value",
    ),
    (
        replaced(metrics=lambda routing: {"weight": routing.weight}),
        "test_auxiliary_and_metrics_are_tensors_of_the_right_kind",
        (64,),
        "the metric 'weight' is attached to the graph",
    ),
    (
        replaced(auxiliary=lambda routing: {"balance": routing.auxiliary["balance"].bfloat16()}),
        "test_auxiliary_and_metrics_are_tensors_of_the_right_kind",
        (64,),
        "the auxiliary loss 'balance' must be fp32, got torch.bfloat16",
    ),
    (changed_routing(a_mean), "test_auxiliary_values_are_sums", (), "'balance' is not a sum over tokens"),
    (changed_routing(everything_routed), "test_invalid_tokens_are_not_routed", (), "not valid has been routed"),
    (
        changed_routing(everything_routed),
        "test_invalid_tokens_are_not_counted",
        (),
        "change the auxiliary loss 'balance'",
    ),
    (
        changed_routing(counted_padding),
        "test_invalid_tokens_are_not_counted",
        (),
        "change the auxiliary loss 'balance'",
    ),
    (changed_routing(seen_padding), "test_hidden_states_of_invalid_tokens_do_not_matter", (), "changes the routing"),
    (changed_routing(noisy), "test_is_deterministic_in_eval", (), "two calls in eval mode"),
    (changed_routing(positional), "test_does_not_depend_on_token_order", (), "set order_independent = False"),
    (changed_routing(detached), "test_gradients_reach_every_parameter", (), "no gradient reaches gate.weight"),
    (changed_routing(learning_in_forward), "test_forward_changes_only_accumulators", (), "forward changed bias"),
    (
        PersistentCounts,
        "test_forward_changes_only_accumulators",
        (),
        "'counts' must be registered with persistent=False",
    ),
    (changed_routing(overwriting), "test_accumulators_add_up", (), "it must add"),
    (
        changed_routing(recounting),
        "test_recomputation_is_not_counted_again",
        (),
        "activation checkpointing computes again",
    ),
    (NoStep, "test_contributes_to_the_step_as_a_whole_or_not_at_all", (), "has only accumulators"),
    (ResettingStep, "test_contributes_to_the_step_as_a_whole_or_not_at_all", (), "changes the accumulator counts"),
    (InfiniteStep, "test_contributes_to_the_step_as_a_whole_or_not_at_all", (), "not finite in bias"),
    (LearningStep, "test_contributes_to_the_step_as_a_whole_or_not_at_all", (), "changes the parameter gate.weight"),
    (UnsavedBias, "test_state_dict_holds_everything", (), "routes differently; something is missing in it"),
    (
        UnsavedSteps,
        "test_state_dict_holds_everything",
        (),
        "differs in bias some steps later; it lacks something",
    ),
    (ScalarParameter, "test_init_weights_fills_everything", (), r"temperature has no dimension .*; give it \(1,\)"),
    (reporting(lambda _: 1.0), "test_what_it_reports_are_scalars", (), "'bias' is not a tensor but a float"),
    (reporting(lambda router: router.bias), "test_what_it_reports_are_scalars", (), r"and has the shape \(8,\)"),
    (
        reporting(lambda router: router.bias.sum() / 0),
        "test_what_it_reports_are_scalars",
        (),
        "the metric 'bias' is (nan|-?inf)",
    ),
]


@pytest.mark.parametrize(("router", "check", "given", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(router, check, given, sentence):
    class Case(RouterConformance):
        n_experts = 8

        def make(self, **sizes):
            return router(**sizes)

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)(*given)


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(RouterConformance) if name.startswith("test_")}

    assert {check for _, check, _, _ in FAULTS} == checks
