"""On a stream that sends most tokens to few experts, balancing evens the load out."""

from typing import Any

import pytest
import torch

from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.router_config import SigmoidTopKConfig, SoftmaxTopKConfig
from forge_plugins_moe.routers.sigmoid_topk import SigmoidTopK
from forge_plugins_moe.routers.softmax_topk import SoftmaxTopK

DIM, EXPERTS, STEPS = 16, 8, 300


def violation(router: Any) -> float:
    """The mean of MaxVio over the last 20 steps of a training whose task is noise."""
    router.init_weights(SeededInitializer(0), "", 0.3)
    generator = torch.Generator().manual_seed(0)
    lean = torch.randn(DIM, generator=generator)
    optimizer = torch.optim.Adam(router.parameters(), lr=1e-3)
    seen = []
    for step in range(STEPS):
        total = torch.zeros(EXPERTS)
        for _ in range(2):
            hidden = torch.randn(256, DIM, generator=generator) + lean
            routing = router(hidden, **({"sequence": torch.arange(256) // 64} if router.needs else {}))
            total += torch.bincount(routing.expert, minlength=EXPERTS)
            task = 0.001 * (routing.weight * torch.randn(routing.weight.shape, generator=generator)).sum()
            ((sum(routing.auxiliary.values()) + task) / 512).backward()
        router.before_optimizer_step({name: value.clone() for name, value in router.accumulators().items()}, step / 300)
        for value in router.accumulators().values():
            value.zero_()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((total.max() / total.mean() - 1).item())
    return sum(seen[-20:]) / 20


def softmax(**keys: Any) -> SoftmaxTopK:
    return SoftmaxTopK(SoftmaxTopKConfig(**keys), dim=DIM, n_experts=EXPERTS)


def sigmoid(**keys: Any) -> SigmoidTopK:
    return SigmoidTopK(SigmoidTopKConfig(**keys), dim=DIM, n_experts=EXPERTS)


@pytest.mark.parametrize("router", [softmax(balance=0.0), sigmoid(bias_rate=0.0)], ids=["softmax", "sigmoid"])
def test_without_balancing_it_stays_uneven(router):
    assert violation(router) > 0.5


@pytest.mark.parametrize(
    "router",
    [
        softmax(),
        softmax(balance_scope="microbatch"),
        softmax(balance_scope="sequence"),
        softmax(balance=0.0, bias_rate=0.001),
        sigmoid(),
        sigmoid(bias_rate=0.01, bias_center=True, bias_schedule="cosine_decay"),
    ],
    ids=["global_batch", "microbatch", "sequence", "softmax_bias", "sigmoid_bias", "decaying_bias"],
)
def test_with_balancing_it_evens_out(router):
    assert violation(router) < 0.2
