"""``softmax_topk`` and ``sigmoid_topk``: choice, weights, the selection bias, what they report."""

import math
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.router_config import SigmoidTopKConfig, SoftmaxTopKConfig
from forge_plugins_moe.routers.selection_bias import bias_move, rate_at
from forge_plugins_moe.routers.sigmoid_topk import SigmoidTopK
from forge_plugins_moe.routers.softmax_topk import SoftmaxTopK


def identity(kind: Any, config: Any, n_experts: int) -> Any:
    """A router whose logits are the hidden states."""
    router = kind(config, dim=n_experts, n_experts=n_experts)
    router.init_weights(SeededInitializer(0), "", 0.5)
    router.gate.weight.data.copy_(torch.eye(n_experts))
    return router


def sigmoid(n_experts: int = 8, **keys: Any) -> Any:
    return identity(SigmoidTopK, SigmoidTopKConfig(**keys), n_experts)


def softmax(n_experts: int = 8, **keys: Any) -> Any:
    return identity(SoftmaxTopK, SoftmaxTopKConfig(**keys), n_experts)


def tokens(count: int = 64, n_experts: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, n_experts, generator=torch.Generator().manual_seed(seed))


class TestKnownBugs:
    """Each has been in a published implementation (numbers are of its issue)."""

    @pytest.mark.parametrize("n_groups", [1, 2])
    def test_the_bias_does_not_weigh(self, n_groups):
        """vLLM 12002, transformers 41647 and 41663."""
        router = sigmoid(n_groups=n_groups, groups_per_token=None if n_groups == 1 else 1)
        router.bias.copy_(torch.tensor([3.0, -2, 0, 0, 5, 1, -1, 2]))
        hidden = tokens()
        routing = router(hidden)

        expert = routing.expert.view(-1, 2)
        score = hidden.double().sigmoid().gather(1, expert)
        torch.testing.assert_close(
            routing.weight.view(-1, 2).double(), score / score.sum(-1, keepdim=True), rtol=1e-5, atol=0
        )

    def test_groups_that_are_left_out_stay_out_where_all_scores_are_negative(self):
        """vLLM 13474, DeepSeek-V3 741, transformers 45440: 0 in the place of −∞ wins against them."""
        router = sigmoid(n_groups=4, groups_per_token=1, top_k=2)
        router.bias.fill_(-10.0)
        hidden = tokens()

        group = router(hidden).expert.view(-1, 2) // 2

        best = hidden.sigmoid().view(-1, 4, 2).sum(-1).argmax(-1)
        assert torch.equal(group, best[:, None].expand(-1, 2))

    def test_a_group_is_as_good_as_its_two_best(self):
        """vLLM 13474 took the best one of it."""
        hidden = torch.tensor([[3.0, -3, -4, 1.5, 1.4, -4]])
        groups = {"n_groups": 2, "groups_per_token": 1, "top_k": 2}

        assert sigmoid(6, **groups)(hidden).expert.tolist() == [3, 4]
        assert sigmoid(6, **groups, group_score="max")(hidden).expert.tolist() == [0, 1]

    @pytest.mark.parametrize("bias", [1e6, -1e6, 1e8])
    def test_weights_are_exact_beside_a_large_bias(self, bias):
        """flashinfer 3875 recovered the score as (score + bias) − bias."""
        router = sigmoid()
        router.bias.fill_(bias)
        hidden = tokens()

        routing = router(hidden)

        score = hidden.double().sigmoid().gather(1, routing.expert.view(-1, 2))
        expected = score / score.sum(-1, keepdim=True)
        torch.testing.assert_close(routing.weight.view(-1, 2).double(), expected, rtol=1e-6, atol=0)

    def test_the_bias_is_no_parameter(self):
        """KempnerForge, among others: an optimizer moves it, and FSDP throws away what forward writes into it."""
        router = sigmoid()

        router(tokens()).weight.sum().backward()

        assert [name for name, _ in router.named_parameters()] == ["gate.weight"]
        assert not router.bias.requires_grad
        assert "bias" in router.state_dict()


class TestSelectionBias:
    def test_experts_with_more_than_the_mean_go_down(self):
        move = bias_move(torch.tensor([9.0, 1, 5, 5]), 0.1, center=False)

        torch.testing.assert_close(move, torch.tensor([-0.1, 0.1, 0, 0]))

    def test_centred_moves_have_no_mean(self):
        move = bias_move(torch.tensor([9.0, 1, 1, 1]), 0.1, center=True)

        torch.testing.assert_close(move, torch.tensor([-0.15, 0.05, 0.05, 0.05]))

    def test_an_even_load_moves_nothing_however_large(self):
        """The sum of so many is not exact in fp32, and neither is their mean."""
        assert not bias_move(torch.full((7,), 2.0**24 - 3), 0.1, center=False).any()

    def test_moves_once_a_step_by_the_load_of_all_microbatches(self):
        router, expected = sigmoid(bias_rate=0.1), torch.zeros(8)
        hidden = torch.cat([tokens(seed=seed) + torch.linspace(-1, 1, 8) for seed in range(2)])

        for piece in hidden.split(48):
            routing = router(piece)
            expected += torch.bincount(routing.expert, minlength=8)
            assert not router.bias.any()
            routing.weight.square().sum().backward()
        assert torch.equal(router.load, expected)
        router.before_optimizer_step(router.accumulators(), 0.5)

        assert torch.equal(router.bias, 0.1 * (expected.mean() - expected).sign())

    def test_counts_nothing_in_evaluation(self):
        router = sigmoid(bias_rate=0.1).eval()

        router(tokens().requires_grad_()).weight.sum().backward()
        router.before_optimizer_step(router.accumulators(), 0.5)

        assert not router.load.any()
        assert not router.bias.any()

    def test_is_followed_in_evaluation(self):
        router = sigmoid().eval()
        router.bias[5:7] = 2

        assert set(router(tokens()).expert.tolist()) == {5, 6}

    def test_stays_where_it_is_with_a_rate_of_0(self):
        router = softmax(bias_rate=0.0)
        router.bias.copy_(torch.arange(8.0))

        router.before_optimizer_step({"sums": router.sums, "load": torch.arange(8.0), "balance_load": router.load}, 0.5)

        assert torch.equal(router.bias, torch.arange(8.0))

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({}, (1, 1, 1, 1)),
            ({"bias_schedule": "cosine_decay"}, (1, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0)),
            ({"bias_schedule": "linear_warmup"}, (0, 1, 1, 1)),
            ({"bias_schedule": "linear_warmup", "bias_warmup": 0.5}, (0, 0.5, 1, 1)),
            ({"bias_frozen_from": 0.4}, (1, 1, 0, 0)),
            ({"bias_schedule": "cosine_decay", "bias_frozen_from": 0.5}, (1, 0.5, 0, 0)),
        ],
    )
    def test_schedules(self, keys, expected):
        config = SigmoidTopKConfig(bias_rate=0.02, **keys)

        rates = [rate_at(progress, config) for progress in (1e-9, 0.25, 0.5, 1.0)]

        assert rates == pytest.approx([0.02 * factor for factor in expected], abs=1e-9)

    def test_moves_by_the_schedule(self):
        router = sigmoid(bias_rate=0.1, bias_schedule="linear_warmup", bias_warmup=0.5)

        router.before_optimizer_step({"sums": router.sums, "load": torch.arange(8.0)}, 0.25)

        torch.testing.assert_close(router.bias, 0.05 * torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1]))


class TestRouting:
    @pytest.mark.parametrize("make", [sigmoid, softmax])
    def test_padding_goes_to_no_expert_with_no_weight(self, make):
        valid = torch.arange(64) % 3 != 0

        routing = make()(tokens(), valid)

        assert routing.top_k == 2
        assert routing.token.tolist() == [t for t in range(64) for _ in range(2)]
        assert (routing.expert.view(-1, 2)[~valid] == 8).all()
        assert (routing.expert.view(-1, 2)[valid] < 8).all()
        assert not routing.weight.view(-1, 2)[~valid].any()

    @pytest.mark.parametrize("make", [sigmoid, softmax])
    def test_is_the_same_in_evaluation(self, make):
        router = make()
        training, evaluation = router(tokens()), router.eval()(tokens())

        assert torch.equal(training.expert, evaluation.expert)
        assert torch.equal(training.weight, evaluation.weight)

    @pytest.mark.parametrize("make", [sigmoid, softmax])
    def test_logits_are_fp32_whatever_the_model_computes_in(self, make):
        """Products in bf16 would tie experts that are 0.4 % apart."""
        router = make()
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
        router.gate.weight.data = weight.bfloat16()
        hidden = tokens().bfloat16()

        logits = router.logits(hidden, None)

        assert logits.dtype == torch.float32
        expected = hidden.double() @ weight.bfloat16().double().T
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)

    def test_the_bias_of_a_softmax_chooses_and_does_not_weigh(self):
        router = softmax(order="softmax_topk", bias_rate=0.1)
        router.bias[3:5] = 2
        hidden = tokens()

        routing = router(hidden)

        assert set(routing.expert.tolist()) == {3, 4}
        expected = hidden.softmax(-1).gather(1, routing.expert.view(-1, 2))
        torch.testing.assert_close(routing.weight.view(-1, 2), expected)

    def test_far_below_0_sqrtsoftplus_has_a_finite_gradient(self):
        hidden = (tokens() - 200).requires_grad_()

        sigmoid(score_function="sqrtsoftplus")(hidden).weight.square().sum().backward()

        assert torch.isfinite(hidden.grad).all()


class TestReports:
    @pytest.mark.parametrize("make", [sigmoid, softmax])
    def test_are_means_over_the_valid_tokens_of_a_step(self, make):
        router, valid = make(top_k=3), torch.arange(64) % 3 != 0
        hidden = tokens()
        for rows in (slice(0, 40), slice(40, 64)):
            router(hidden[rows], valid[rows]).weight.square().sum().backward()
        router.before_optimizer_step(router.accumulators(), 0.5)

        logits = hidden[valid].double()
        score = logits.softmax(-1) if make is softmax else logits.sigmoid()
        p = score / score.sum(-1, keepdim=True)
        best = p.sort(-1, descending=True).values
        expected = {
            "router_entropy": -(p * p.log()).sum(-1).mean() / math.log(8),
            "router_confidence": best[:, 0].mean(),
            "router_margin": (best[:, 0] - best[:, 1]).mean(),
            "router_selected": best[:, :3].sum(-1).mean(),
            "router_logit_rms": logits.square().mean().sqrt(),
        }
        metrics = router.step_metrics()
        for name, value in expected.items():
            assert metrics[name].dtype == torch.float32
            assert metrics[name].item() == pytest.approx(value.item(), rel=1e-4), name

    def test_of_the_bias(self):
        router = sigmoid()
        router.bias.copy_(torch.tensor([0.0, 0, 0, 0, 1, 1, 1, -3]))

        metrics = router.step_metrics()

        assert metrics["router_bias_min"] == -3
        assert metrics["router_bias_max"] == 1
        assert metrics["router_bias_std"].item() == pytest.approx(1.5**0.5)

    def test_of_a_single_expert_are_finite(self):
        router = softmax(1, top_k=1, order="softmax_topk")
        router(tokens(n_experts=1)).weight.sum().backward()
        router.before_optimizer_step(router.accumulators(), 0.5)

        assert all(torch.isfinite(value) for value in router.step_metrics().values())


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "sentence"),
        [
            (SigmoidTopKConfig(top_k=9), "router.top_k: 9 experts a token are more than the 8 that there are"),
            (
                SigmoidTopKConfig(n_groups=3, groups_per_token=2),
                "router.n_groups: 8 experts cannot be put into 3 equal groups",
            ),
            (
                SigmoidTopKConfig(n_groups=4, groups_per_token=2, top_k=5),
                r"router.top_k: 5 experts a token are more than the 4 in 2 groups \(groups_per_token\)",
            ),
            (
                SigmoidTopKConfig(n_groups=8, groups_per_token=2),
                'router.group_score: there is one expert a group, and no second best score; set group_score = "max"',
            ),
        ],
    )
    def test_of_what_cannot_be_with_so_many_experts(self, config, sentence):
        with pytest.raises(ConfigError, match=sentence):
            SigmoidTopK(config, dim=4, n_experts=8)


COMPILED: list[tuple[Any, dict[str, Any]]] = [
    (softmax, {}),
    (softmax, {"balance_scope": "sequence", "z_loss": 0.001, "n_groups": 4, "groups_per_token": 2}),
    (sigmoid, {"balance": 0.01, "balance_scope": "sequence"}),
    (sigmoid, {"balance": 0.01, "balance_scope": "global_batch", "n_groups": 4, "groups_per_token": 2}),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("make", "keys"), COMPILED)
def test_compiles_into_one_graph(make, keys, padded):
    """Forward and backward, with the counts."""
    eager, compiled = make(**keys), make(**keys)
    torch.compiler.reset()
    graph = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    facts = {"sequence": torch.arange(64) // 16} if eager.needs else {}
    valid = torch.arange(64) % 3 != 0 if padded else None

    outcomes = []
    for router in (eager, graph):
        hidden = tokens().requires_grad_()
        for _ in range(2):
            routing = router(hidden, valid, **facts)
            (routing.weight.square().sum() + sum(routing.auxiliary.values())).backward()
        outcomes.append((routing.expert, routing.weight, hidden.grad))

    assert torch.equal(outcomes[0][0], outcomes[1][0])
    for one, other in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled.gate.weight.grad, eager.gate.weight.grad, rtol=1e-4, atol=1e-5)
    for name, value in eager.accumulators().items():
        assert value.any(), name
        torch.testing.assert_close(compiled.accumulators()[name], value, rtol=1e-5, atol=1e-5)
