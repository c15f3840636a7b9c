from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_testing.router import RouterConformance as OfAnyRouter


class RouterConformance(OfAnyRouter):
    """With what is promised of the routers of this package beyond the contract."""

    def test_the_host_does_not_wait(self) -> None:
        """Forward and backward need shapes alone; whatever looks at a value raises."""
        router = self.build_router().train()
        with FakeTensorMode(allow_non_fake_inputs=True):
            hidden = torch.randn(64, self.dim, requires_grad=True)
            facts = {"token_ids": torch.arange(64), "sequence": torch.arange(64) // 16, "noise": torch.arange(64)}
            needed = {name: facts[name] for name in getattr(router, "needs", ())}

            routing = router(hidden, torch.arange(64) % 3 != 1, **needed)

            assert isinstance(len(routing.token), int)
            (routing.weight.sum() + sum(routing.auxiliary.values()) + 0 * hidden.sum()).backward()

    def test_says_how_many_experts_a_token_visits(self) -> None:
        router = self.build_router().train(self.has_another_in_evaluation)
        hidden = torch.randn(64, self.dim, generator=torch.Generator().manual_seed(0))
        facts = {"token_ids": torch.arange(64), "sequence": torch.arange(64) // 16, "noise": torch.arange(64)}
        routing = router(hidden, **{name: facts[name] for name in getattr(router, "needs", ())})

        visited = (routing.expert < self.n_experts).sum().item() / 64
        assert 0 <= router.experts_per_token - visited <= self.rounded_away
        assert routing.top_k in (None, router.experts_per_token)

    rounded_away: ClassVar[float] = 0.0
    has_another_in_evaluation: ClassVar[bool] = False


class TestSoftmaxTopK(RouterConformance):
    component = "forge-plugins-moe:softmax_topk"


class TestGptOss(RouterConformance):
    component = "forge-plugins-moe:softmax_topk"
    config = {"gate_bias": True}


class TestSwitch(RouterConformance):
    component = "forge-plugins-moe:softmax_topk"
    config: ClassVar = {"top_k": 1, "order": "softmax_topk", "balance_scope": "microbatch", "z_loss": 0.001}


class TestSoftmaxTopKOfSequences(RouterConformance):
    component = "forge-plugins-moe:softmax_topk"
    config: ClassVar = {"top_k": 3, "balance_scope": "sequence", "order": "softmax_topk", "normalize": True}


class TestSoftmaxTopKOfAllExperts(RouterConformance):
    component = "forge-plugins-moe:softmax_topk"
    config: ClassVar = {"top_k": 8, "bias_rate": 0.01, "bias_center": True}


class TestGroupedSoftmaxTopK(RouterConformance):
    component = "forge-plugins-moe:softmax_topk"
    config: ClassVar = {"n_groups": 4, "groups_per_token": 2, "group_score": "max", "balance_counts": "routed"}


class TestSigmoidTopK(RouterConformance):
    component = "forge-plugins-moe:sigmoid_topk"
    config: ClassVar = {"bias_rate": 0.1}


class TestDeepSeekV3(RouterConformance):
    component = "forge-plugins-moe:sigmoid_topk"
    config: ClassVar = {
        "top_k": 3,
        "n_groups": 4,
        "groups_per_token": 2,
        "route_scale": 2.5,
        "balance": 0.0001,
        "bias_rate": 0.1,
        "bias_schedule": "cosine_decay",
    }


class TestSqrtSoftplus(RouterConformance):
    component = "forge-plugins-moe:sigmoid_topk"
    config: ClassVar = {
        "score_function": "sqrtsoftplus",
        "normalize": False,
        "top_k": 1,
        "balance": 0.01,
        "balance_scope": "global_batch",
    }


class TestExpertChoice(RouterConformance):
    component = "forge-plugins-moe:expert_choice"


class TestExpertChoiceOfBatches(RouterConformance):
    component = "forge-plugins-moe:expert_choice"
    config: ClassVar = {"scope": "batch", "experts_per_token": 1.3, "score_function": "sigmoid"}
    rounded_away = 8 / 64


class TestPredictedExpertChoice(RouterConformance):
    component = "forge-plugins-moe:expert_choice"
    config: ClassVar = {"predictor": True}
    has_another_in_evaluation = True


class TestNoisyExpertChoice(RouterConformance):
    component = "forge-plugins-moe:expert_choice"
    config: ClassVar = {"score_function": "sigmoid", "gumbel_noise": True}


class TestInferenceOfExpertChoice(RouterConformance):
    component = "forge-plugins-moe:expert_choice"
    config: ClassVar = {"predictor": True, "scope": "batch"}

    def make(self, **given: Any) -> Any:
        return super().make(**given).inference_router()

    expected_failures: ClassVar = {
        "test_gradients_reach_every_parameter": "the predictor is trained by the router that it stands in for",
        "test_says_how_many_experts_a_token_visits": "it is not trained here",
    }


class TestHash(RouterConformance):
    component = "forge-plugins-moe:hash"


class TestRandomHash(RouterConformance):
    component = "forge-plugins-moe:hash"
    config: ClassVar = {"top_k": 3, "table": "random"}


class TestGatedHash(RouterConformance):
    component = "forge-plugins-moe:hash"
    config: ClassVar = {"top_k": 2, "weights": "gate"}


class TestHashOfAFile(RouterConformance):
    component = "forge-plugins-moe:hash"

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path_factory.mktemp("table") / "counts.npy"
        np.save(file, np.array([5, 3, 3, 1, 1, 1, 0]))
        monkeypatch.setattr(type(self), "config", {"top_k": 2, "file": str(file)})


class TestSinkhorn(RouterConformance):
    component = "forge-plugins-moe:sinkhorn"
    config: ClassVar = {"z_loss": 0.001}


class TestSigmoidSinkhorn(RouterConformance):
    component = "forge-plugins-moe:sinkhorn"
    config: ClassVar = {"top_k": 1, "score_function": "sigmoid"}


class TestNoisyTopK(RouterConformance):
    component = "forge-plugins-moe:noisy_topk"

    def build_router(self, seed: int = 0) -> Any:
        """With noise that follows from the token, so that equal tokens have equal noise."""
        router = super().build_router(seed)
        router.draw = lambda like: torch.sin(1000 * like)
        return router


class TestUniform(RouterConformance):
    component = "forge-plugins-moe:uniform"
    order_independent = False
