"""Auxiliary losses and their gradients against their formulas, in float64, one token after the other."""

import math
from typing import Any

import pytest
import torch

from forge_core.ops import sequence_sum as sequences
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.router_config import NoisyTopKConfig, SigmoidTopKConfig, SoftmaxTopKConfig
from forge_plugins_moe.routers.loss import squared_variation
from forge_plugins_moe.routers.noisy_topk import NoisyTopK
from forge_plugins_moe.routers.sigmoid_topk import SigmoidTopK
from forge_plugins_moe.routers.softmax_topk import SoftmaxTopK
from forge_testing.several_ranks import on_ranks

DIM, EXPERTS, K = 6, 8, 3
LENGTHS = (1, 9, 4, 26)
"""Of the sequences, in tokens."""


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randn(sum(LENGTHS), DIM, generator=torch.Generator().manual_seed(seed))


def sequence_numbers() -> torch.Tensor:
    """Not in order, and with gaps."""
    number = torch.tensor([7, 0, 30, 11]).repeat_interleave(torch.tensor(LENGTHS))
    return number[torch.randperm(len(number), generator=torch.Generator().manual_seed(1))]


def validity() -> torch.Tensor:
    return torch.arange(sum(LENGTHS)) % 5 != 2


def softmax_router(**keys: Any) -> SoftmaxTopK:
    config = SoftmaxTopKConfig(**({"top_k": K, "balance": 0.3, "order": "softmax_topk"} | keys))
    return ready(SoftmaxTopK(config, dim=DIM, n_experts=EXPERTS))


def sigmoid_router(**keys: Any) -> SigmoidTopK:
    config = SigmoidTopKConfig(**({"top_k": K, "balance": 0.3} | keys))
    return ready(SigmoidTopK(config, dim=DIM, n_experts=EXPERTS))


def ready(router: Any) -> Any:
    router.init_weights(SeededInitializer(0), "", 0.5)
    return router


def check(router: Any, name: str, expected: torch.Tensor, wide: torch.Tensor, value: torch.Tensor) -> None:
    """Value and gradient; ``wide`` is the float64 gate from which ``expected`` is made."""
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-7)
    (mine,) = torch.autograd.grad(value, router.gate.weight)
    (theirs,) = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6, msg=f"the gradient of {name!r} is another")


def wide_logits(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = router.gate.weight.detach().double().requires_grad_()
    return hidden.double() @ weight.T, weight


def balance_loss(probability: torch.Tensor, chosen: list[list[int]], members: list[int]) -> torch.Tensor:
    """The mean over ``members`` of ``E · Σ f_i P_i``."""
    count = [sum(chosen[t].count(expert) for t in members) for expert in range(EXPERTS)]
    mean = torch.stack([probability[t] for t in members]).mean(0)
    return EXPERTS * sum(count[i] / (len(members) * K) * mean[i] for i in range(EXPERTS))


def top(scores: torch.Tensor) -> list[list[int]]:
    return [sorted(range(EXPERTS), key=lambda i: -row[i])[:K] for row in scores.tolist()]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
class TestLoadBalance:
    def test_of_a_microbatch(self, scores, padded):
        router = (softmax_router if scores == "softmax" else sigmoid_router)(balance_scope="microbatch")
        hidden, valid = tokens(), validity() if padded else None
        logits, weight = wide_logits(router, hidden)
        members = torch.arange(len(hidden))[valid if padded else slice(None)].tolist()
        expected = 0.3 * len(members) * balance_loss(self.probability(logits, scores), top(logits), members)

        check(router, "load_balance", expected, weight, router(hidden, valid).auxiliary["load_balance"])

    def test_of_sequences(self, scores, padded):
        router = (softmax_router if scores == "softmax" else sigmoid_router)(balance_scope="sequence")
        hidden, number, valid = tokens(), sequence_numbers(), validity()
        if not padded:
            valid = torch.ones_like(valid)
        logits, weight = wide_logits(router, hidden)
        probability = self.probability(logits, scores)
        expected = torch.zeros((), dtype=torch.float64)
        for one in number.unique():
            members = torch.arange(len(hidden))[(number == one) & valid].tolist()
            if members:
                expected = expected + 0.3 * len(members) * balance_loss(probability, top(logits), members)

        value = router(hidden, valid, sequence=number).auxiliary["load_balance"]
        check(router, "load_balance", expected, weight, value)

    def test_of_a_global_batch_takes_the_counts_of_the_step_before(self, scores, padded):
        router = (softmax_router if scores == "softmax" else sigmoid_router)(balance_scope="global_batch")
        hidden, valid = tokens(), validity() if padded else None
        before = torch.tensor([9.0, 1, 1, 1, 2, 2, 0, 4])
        router.before_optimizer_step(router.accumulators() | {"balance_load": before}, 0.5)
        logits, weight = wide_logits(router, hidden)
        members = torch.arange(len(hidden))[valid if padded else slice(None)]
        mean = self.probability(logits, scores)[members].mean(0)
        expected = 0.3 * len(members) * EXPERTS * (before.double() / before.sum() * mean).sum()

        check(router, "load_balance", expected, weight, router(hidden, valid).auxiliary["load_balance"])

    def probability(self, logits, scores):
        return logits.softmax(-1) if scores == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)


class TestGlobalBatch:
    def test_does_not_depend_on_how_a_step_is_cut(self):
        """Two steps, the second with the counts of the first: in one piece, and in pieces of 13."""
        gradients = []
        for size in (40, 13):
            router = softmax_router()
            for step in range(2):
                router.gate.weight.grad = None
                for piece in tokens(step).split(size):
                    routing = router(piece)
                    (routing.weight.square().sum() + routing.auxiliary["load_balance"]).backward()
                router.before_optimizer_step(router.accumulators(), 0.5)
                for buffer in router.accumulators().values():
                    buffer.zero_()
            assert not torch.allclose(router.load_share, torch.full((EXPERTS,), 1 / EXPERTS))
            gradients.append(router.gate.weight.grad)

        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)

    def test_pushes_nothing_in_the_first_step(self):
        router = softmax_router()

        (gradient,) = torch.autograd.grad(router(tokens()).auxiliary["load_balance"], router.gate.weight)

        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)

    def test_keeps_its_counts_over_a_step_without_tokens(self):
        router = softmax_router()
        before = torch.tensor([9.0, 1, 1, 1, 2, 2, 0, 4])
        router.before_optimizer_step(router.accumulators() | {"balance_load": before}, 0.5)

        router.before_optimizer_step(router.accumulators(), 0.6)

        assert torch.equal(router.load_share, before / before.sum())

    def test_is_0_while_the_router_is_frozen(self):
        """Its counts stay those of a step long ago."""
        router, names = softmax_router(gate_bias=True), {"gate.weight", "gate.bias"}
        router.before_optimizer_step(router.accumulators() | {"balance_load": torch.arange(8.0)}, 0.5)
        found = {}
        for frozen in ((), ("gate.bias",), names, ()):
            router.set_frozen(frozen)
            found[len(frozen)] = router(tokens()).auxiliary["load_balance"].item() > 0

        assert found == {0: True, 1: True, 2: False}
        other = softmax_router(balance_scope="microbatch")
        other.set_frozen(names)
        assert other(tokens()).auxiliary["load_balance"].item() > 0, "it counts the tokens of now"


class TestCounts:
    """Which choices the balance loss counts, with a bias that sends all tokens to the last experts."""

    def test_are_those_of_the_scores_alone(self):
        router = sigmoid_router(balance_scope="microbatch")
        router.bias.copy_(torch.tensor([0.0] * 5 + [9.0] * 3))
        logits, weight = wide_logits(router, tokens())
        probability = TestLoadBalance().probability(logits, "sigmoid")
        expected = 0.3 * 40 * balance_loss(probability, top(logits), list(range(40)))

        check(router, "load_balance", expected, weight, router(tokens()).auxiliary["load_balance"])

    def test_are_those_that_are_made(self):
        router = sigmoid_router(balance_scope="microbatch", balance_counts="routed")
        router.bias.copy_(torch.tensor([0.0] * 5 + [9.0] * 3))
        logits, weight = wide_logits(router, tokens())
        probability = TestLoadBalance().probability(logits, "sigmoid")
        expected = 0.3 * 40 * balance_loss(probability, [[5, 6, 7]] * 40, list(range(40)))

        check(router, "load_balance", expected, weight, router(tokens()).auxiliary["load_balance"])

    @pytest.mark.parametrize("function", ["sigmoid", "softmax"])
    def test_of_the_scores_ignore_groups(self, function):
        make = sigmoid_router if function == "sigmoid" else softmax_router  # which has no bias
        groups = {"n_groups": 4, "groups_per_token": 2}
        router = make(balance_scope="microbatch", **groups)
        limited = make(balance_scope="microbatch", balance_counts="routed", **groups)
        logits, weight = wide_logits(router, tokens())
        probability = TestLoadBalance().probability(logits, function)
        expected = 0.3 * 40 * balance_loss(probability, top(logits), list(range(40)))

        value = router(tokens()).auxiliary["load_balance"]

        check(router, "load_balance", expected, weight, value)
        assert not torch.isclose(value, limited(tokens()).auxiliary["load_balance"])


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global_batch"])
def test_an_even_router_has_the_loss_of_its_coefficient(scope):
    router = softmax_router(balance_scope=scope)
    router.gate.weight.data.zero_()

    value = router(tokens(), sequence=sequence_numbers()).auxiliary["load_balance"]

    torch.testing.assert_close(value / 40, torch.tensor(0.3))


def test_an_extreme_router_has_experts_over_top_k_times_its_coefficient():
    router = softmax_router(balance_scope="microbatch", top_k=1)
    hidden = torch.ones(40, DIM)
    router.gate.weight.data.zero_()
    router.gate.weight.data[3] = 100

    torch.testing.assert_close(router(hidden).auxiliary["load_balance"] / 40, torch.tensor(0.3 * EXPERTS))


@pytest.mark.parametrize("padded", [False, True])
def test_z_loss_is_of_raw_logits(padded):
    router = sigmoid_router(balance=0.0, z_loss=0.01)
    router.bias.fill_(5.0)
    hidden, valid = tokens(), validity() if padded else None
    logits, weight = wide_logits(router, hidden)
    rows = torch.arange(len(hidden))[valid if padded else slice(None)].tolist()
    expected = 0.01 * sum(logits[t].exp().sum().log() ** 2 for t in rows)

    check(router, "router_z", expected, weight, router(hidden, valid).auxiliary["router_z"])


class Fixed(NoisyTopK):
    def draw(self, like):
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("padded", [False, True])
class TestNoisyTopKLosses:
    def router(self, **keys):
        router = ready(Fixed(NoisyTopKConfig(top_k=K, **keys), dim=DIM, n_experts=EXPERTS))
        router.noise.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(5))
        return router

    def wide(self, router, hidden):
        """Clean and noisy logits and the deviation, in float64, and the two weights that they are made of."""
        clean, gate = wide_logits(router, hidden)
        noise = router.noise.weight.detach().double().requires_grad_()
        deviation = torch.log1p((hidden.double() @ noise.T).exp())
        return clean, clean + router.draw(clean).double() * deviation, deviation, gate, noise

    def variation(self, totals):
        mean = sum(totals) / EXPERTS
        return sum((total - mean) ** 2 for total in totals) / EXPERTS / mean**2

    def check(self, router, value, expected, gate, noise):
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-7)
        mine = torch.autograd.grad(value, [router.gate.weight, router.noise.weight])
        theirs = torch.autograd.grad(expected, [gate, noise])
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)

    def test_importance(self, padded):
        router, hidden, valid = self.router(load=0.0), tokens(), validity() if padded else None
        _, noisy, _, gate, noise = self.wide(router, hidden)
        rows = torch.arange(len(hidden))[valid if padded else slice(None)].tolist()
        totals = [torch.zeros((), dtype=torch.float64) for _ in range(EXPERTS)]
        for t in rows:
            chosen = top(noisy[t : t + 1])[0]
            whole = sum(noisy[t, i].exp() for i in chosen)
            for i in chosen:
                totals[i] = totals[i] + noisy[t, i].exp() / whole

        value = router(hidden, valid).auxiliary["importance_variation"]
        self.check(router, value, 0.1 * len(rows) * self.variation(totals), gate, noise)

    def test_load(self, padded):
        router, hidden, valid = self.router(importance=0.0), tokens(), validity() if padded else None
        clean, noisy, deviation, gate, noise = self.wide(router, hidden)
        rows = torch.arange(len(hidden))[valid if padded else slice(None)].tolist()
        totals = [torch.zeros((), dtype=torch.float64) for _ in range(EXPERTS)]
        for t in rows:
            for i in range(EXPERTS):
                others = sorted((noisy[t, j] for j in range(EXPERTS) if j != i), reverse=True)
                ahead = (clean[t, i] - others[K - 1]) / deviation[t, i]
                totals[i] = totals[i] + 0.5 * (1 + torch.erf(ahead / math.sqrt(2)))

        value = router(hidden, valid).auxiliary["load_variation"]
        self.check(router, value, 0.1 * len(rows) * self.variation(totals), gate, noise)


def test_variation_is_that_of_a_population():
    values = torch.tensor([1.0, 2, 3, 6])

    torch.testing.assert_close(squared_variation(values), torch.tensor(3.5 / 9))


class SharedSequences:
    """Two ranks, each with some positions of every sequence."""

    def whole(self):
        """Value and gradient of the balance loss on one rank."""
        return self._loss(tokens(), sequence_numbers(), validity())

    def part(self):
        """This rank's part of them."""
        rank = torch.distributed.get_rank()
        sequences.share_out_positions(torch.distributed.group.WORLD)
        try:
            # sequence numbers stay below the number of tokens on all ranks
            return self._loss(tokens()[rank::2], sequence_numbers()[rank::2], validity()[rank::2])
        finally:
            sequences.share_out_positions(None)

    def _loss(self, hidden, number, valid):
        router = sigmoid_router(balance_scope="sequence")
        value = router(hidden, valid, sequence=number).auxiliary["load_balance"]
        (gradient,) = torch.autograd.grad(value, router.gate.weight)
        return value.detach(), gradient


def test_sequence_loss_is_exact_where_ranks_share_sequences():
    parts = on_ranks(SharedSequences, "part", 2)

    value, gradient = SharedSequences().whole()
    torch.testing.assert_close(parts[0][0] + parts[1][0], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts[0][1] + parts[1][1], gradient, rtol=1e-5, atol=1e-6)
    assert not torch.isclose(2 * parts[0][0], value, rtol=1e-3)
