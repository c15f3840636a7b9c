"""``sinkhorn``, ``noisy_topk`` and ``uniform``."""

import math
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.router_config import NoisyTopKConfig, SinkhornConfig, UniformConfig
from forge_plugins_moe.routers.noisy_topk import NoisyTopK, chance_of_choice
from forge_plugins_moe.routers.sinkhorn import Sinkhorn, log_plan
from forge_plugins_moe.routers.uniform import Uniform

EXPERTS = 8


def identity(kind: Any, config: Any) -> Any:
    """A router whose logits are the hidden states."""
    router = kind(config, dim=EXPERTS, n_experts=EXPERTS)
    router.init_weights(SeededInitializer(0), "", 0.5)
    router.gate.weight.data.copy_(torch.eye(EXPERTS))
    return router


def tokens(count: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, EXPERTS, generator=torch.Generator().manual_seed(seed))


def leaning(count: int = 512) -> torch.Tensor:
    """Logits that send most tokens to the last experts."""
    return tokens(count) + torch.linspace(-2, 2, EXPERTS)


class TestSinkhorn:
    @pytest.mark.parametrize("scale", [1.0, 100.0])
    def test_rows_sum_to_one_over_tokens_and_columns_to_one_over_experts(self, scale):
        """Also where exp of a logit is infinite in fp32."""
        plan = log_plan(scale * leaning() / 3, None, 2000 if scale > 1 else 16).exp()

        torch.testing.assert_close(plan.sum(0), torch.full((EXPERTS,), 1 / EXPERTS), rtol=1e-3, atol=0)
        torch.testing.assert_close(plan.sum(1), torch.full((512,), 1 / 512), rtol=2e-2, atol=0)

    def test_is_that_of_the_iteration_in_float64(self):
        """As in Megatron-LM, without its constants against a division by 0."""
        logits = leaning()
        cost = logits.double().exp()
        d0, d1 = torch.ones(512).double(), torch.ones(EXPERTS).double()
        for _ in range(16):
            d0 = 1 / (512 * (d1 * cost).sum(1))
            d1 = 1 / (EXPERTS * (d0[:, None] * cost).sum(0))

        plan = log_plan(logits, None, 16).exp().double()
        torch.testing.assert_close(plan, d1 * cost * d0[:, None], rtol=1e-4, atol=0)

    def test_padding_takes_no_share(self):
        valid = torch.arange(512) % 4 != 0

        plan = log_plan(leaning(), valid, 16)

        torch.testing.assert_close(plan[valid], log_plan(leaning()[valid], None, 16), rtol=1e-4, atol=1e-4)
        assert not plan[~valid].exp().any()

    def test_nothing_but_padding(self):
        routing = identity(Sinkhorn, SinkhornConfig())(tokens(), torch.zeros(64, dtype=torch.bool))

        assert (routing.expert == EXPERTS).all()
        assert not routing.weight.any()

    def test_evens_the_load_out_in_training_only(self):
        router = identity(Sinkhorn, SinkhornConfig(top_k=1))

        trained = torch.bincount(router(leaning()).expert, minlength=EXPERTS)
        evaluated = router.eval()(leaning())

        assert trained.max() / 64 < 1.3
        assert torch.equal(evaluated.expert, leaning().argmax(-1))
        assert torch.bincount(evaluated.expert).max() / 64 > 3

    @pytest.mark.parametrize("function", ["softmax", "sigmoid"])
    def test_weights_are_scores_of_the_logits(self, function):
        hidden = leaning().requires_grad_()
        routing = identity(Sinkhorn, SinkhornConfig(score_function=function))(hidden)

        scores = hidden.softmax(-1) if function == "softmax" else hidden.sigmoid()
        expected = scores.gather(1, routing.expert.view(-1, 2)).flatten()
        torch.testing.assert_close(routing.weight, expected)
        mine, theirs = (torch.autograd.grad(w.square().sum(), hidden)[0] for w in (routing.weight, expected))
        torch.testing.assert_close(mine, theirs)


class TestNoisyTopK:
    def test_weights_are_the_softmax_over_the_chosen_noisy_logits(self):
        router = identity(NoisyTopK, NoisyTopKConfig(top_k=3))
        torch.manual_seed(0)
        noisy = tokens() + torch.randn(64, EXPERTS) * math.log(2)
        torch.manual_seed(0)

        routing = router(tokens())

        expected = noisy.topk(3)
        assert torch.equal(routing.expert.view(-1, 3), expected.indices)
        torch.testing.assert_close(routing.weight.view(-1, 3), expected.values.softmax(-1))

    def test_there_is_no_noise_in_evaluation(self):
        router = identity(NoisyTopK, NoisyTopKConfig()).eval()

        assert torch.equal(router(tokens()).expert.view(-1, 2), tokens().topk(2).indices)

    def test_noise_is_another_each_time(self):
        router = identity(NoisyTopK, NoisyTopKConfig())

        assert not torch.equal(router(tokens()).expert, router(tokens()).expert)

    def test_chance_of_choice_is_how_often_it_happens(self):
        """100,000 draws of each expert's own noise, the others' held."""
        generator = torch.Generator().manual_seed(0)
        clean, deviation = torch.randn(5, generator=generator), 0.5 + torch.rand(5, generator=generator)
        noisy = clean + deviation * torch.randn(5, generator=generator)

        chance = chance_of_choice(clean[None], noisy[None], deviation[None], 2)[0]

        for expert in range(5):
            draws = noisy.repeat(100_000, 1)
            draws[:, expert] = clean[expert] + deviation[expert] * torch.randn(100_000, generator=generator)
            happened = (draws.topk(2).indices == expert).any(-1).float().mean()
            assert chance[expert].item() == pytest.approx(happened.item(), abs=0.01)

    def test_gradients_are_finite_where_noise_vanishes(self):
        router = identity(NoisyTopK, NoisyTopKConfig())
        router.noise.weight.data.fill_(-100.0)
        hidden = tokens().abs().requires_grad_()
        routing = router(hidden)

        (routing.weight.square().sum() + sum(routing.auxiliary.values())).backward()

        assert all(torch.isfinite(p.grad).all() for p in router.parameters())
        assert torch.isfinite(hidden.grad).all()

    def test_refuses_to_choose_all_experts(self):
        with pytest.raises(ConfigError, match=r"router\.top_k: 8 of 8 experts leave no choice"):
            identity(NoisyTopK, NoisyTopKConfig(top_k=8))


class TestUniform:
    def test_goes_round(self):
        routing = Uniform(UniformConfig(top_k=3), dim=4, n_experts=8)(torch.randn(4, 4))

        assert routing.expert.view(4, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]
        torch.testing.assert_close(routing.weight, torch.full((12,), 1 / 3))

    def test_refuses_more_experts_than_there_are(self):
        with pytest.raises(ConfigError, match=r"router\.top_k: 9 experts a token are more than the 8"):
            Uniform(UniformConfig(top_k=9), dim=4, n_experts=8)
