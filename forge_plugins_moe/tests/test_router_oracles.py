"""Routers against those of transformers, 200 random cases each."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
    router_z_loss_func,
)

from forge_core.contracts.router import Routing
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.router_config import HashConfig, SigmoidTopKConfig, SoftmaxTopKConfig
from forge_plugins_moe.routers.hash import hash_router
from forge_plugins_moe.routers.sigmoid_topk import SigmoidTopK
from forge_plugins_moe.routers.softmax_topk import SoftmaxTopK

CASES = 200


class Draw:
    """The shapes and tensors of one random case."""

    def __init__(self, case: int, *, grouped: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(case)
        self.n_groups = 2 ** self._number(1, 3) if grouped else 1
        self.n_experts = self.n_groups * self._number(2, 5) if grouped else self._number(2, 24)
        self.groups_per_token = self._number(1, max(1, self.n_groups - 1))
        reachable = self.n_experts // self.n_groups * self.groups_per_token
        self.top_k = self._number(1, reachable)
        self.dim = self._number(1, 24)
        self.hidden = self.normal(self._number(1, 40), self.dim)
        self.weight = self.normal(self.n_experts, self.dim) / self.dim**0.5
        self.bias = self.normal(self.n_experts) * 10.0 ** self._number(-3, 1)
        self.scale = 0.5 + 3 * torch.rand((), generator=self.generator).item()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def _number(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self.generator))


def cases(**keys: Any) -> Iterator[Draw]:
    for case in range(CASES):
        yield Draw(case, **keys)


def route(router: Any, draw: Draw, **facts: torch.Tensor) -> Routing:
    router.init_weights(SeededInitializer(0), "", 0.5)
    with torch.no_grad():
        router.gate.weight.copy_(draw.weight)
        if "bias" in dict(router.named_buffers()):
            router.bias.copy_(draw.bias)
    routing: Routing = router(draw.hidden, **facts)
    return routing


def oracle(kind: Callable[..., Any], draw: Draw, **keys: Any) -> Any:
    sizes = {
        "num_experts_per_tok": draw.top_k,
        "num_local_experts": draw.n_experts,
        "num_experts": draw.n_experts,
        "hidden_size": draw.dim,
        "routed_scaling_factor": draw.scale,
    }
    router = kind(SimpleNamespace(**(sizes | keys)))
    with torch.no_grad():
        router.weight.copy_(draw.weight)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(draw.bias)
    return router


def assert_same(routing: Routing, weight: torch.Tensor, expert: torch.Tensor) -> None:
    """The same experts of each token, with the same weights."""
    assert routing.top_k == expert.shape[1]
    mine = routing.expert.view(expert.shape).sort(-1)
    theirs = expert.sort(-1)
    assert torch.equal(mine.values, theirs.values)
    by_expert = routing.weight.view(expert.shape).gather(1, mine.indices)
    torch.testing.assert_close(by_expert, weight.gather(1, theirs.indices), rtol=1e-5, atol=1e-7)


def softmax(draw: Draw, **keys: Any) -> SoftmaxTopK:
    config = SoftmaxTopKConfig(top_k=draw.top_k, **({"order": "softmax_topk"} | keys))
    return SoftmaxTopK(config, dim=draw.dim, n_experts=draw.n_experts)


def sigmoid(draw: Draw, **keys: Any) -> SigmoidTopK:
    config = SigmoidTopKConfig(top_k=draw.top_k, **({"normalize": draw.top_k > 1} | keys))
    return SigmoidTopK(config, dim=draw.dim, n_experts=draw.n_experts)


def test_mixtral():
    for draw in cases():
        draw.top_k = max(draw.top_k, 2)
        _, weight, expert = oracle(MixtralTopKRouter, draw)(draw.hidden)

        assert_same(route(softmax(draw, order="topk_softmax"), draw), weight, expert)


def test_gpt_oss():
    for draw in cases():
        draw.top_k = max(draw.top_k, 2)
        _, weight, expert = oracle(GptOssTopKRouter, draw)(draw.hidden)

        assert_same(route(softmax(draw, order="topk_softmax"), draw), weight, expert)


def test_olmoe():
    for draw in cases():
        _, weight, expert = oracle(OlmoeTopKRouter, draw, norm_topk_prob=False)(draw.hidden)

        assert_same(route(softmax(draw), draw), weight, expert)


def test_qwen3_moe():
    for draw in cases():
        normalize = draw.top_k > 1
        _, weight, expert = oracle(Qwen3MoeTopKRouter, draw, norm_topk_prob=normalize)(draw.hidden)

        assert_same(route(softmax(draw, normalize=normalize), draw), weight, expert)


def test_switch():
    for draw in cases():
        draw.top_k = 1
        config = SimpleNamespace(
            num_experts=draw.n_experts,
            expert_capacity=len(draw.hidden),
            hidden_size=draw.dim,
            router_bias=False,
            router_jitter_noise=0.0,
            router_ignore_padding_tokens=False,
            router_dtype="float32",
        )
        router = SwitchTransformersTop1Router(config)
        with torch.no_grad():
            router.classifier.weight.copy_(draw.weight)
        mask, weight, logits = router(draw.hidden[None])
        routing = route(softmax(draw, z_loss=1.0), draw)

        assert_same(routing, weight[0], mask[0].argmax(-1, keepdim=True))
        z_loss = router_z_loss_func(logits) * len(draw.hidden)
        torch.testing.assert_close(routing.auxiliary["router_z"], z_loss)


def test_deepseek_v2():
    for draw in cases(grouped=True):
        method = {"topk_method": "group_limited_greedy", "n_group": draw.n_groups, "topk_group": draw.groups_per_token}
        _, weight, expert = oracle(DeepseekV2TopkRouter, draw, **method)(draw.hidden)
        groups = {"n_groups": draw.n_groups, "groups_per_token": draw.groups_per_token, "group_score": "max"}

        assert_same(route(softmax(draw, route_scale=draw.scale, **groups), draw), weight, expert)


def test_ernie():
    for draw in cases():
        draw.top_k = max(draw.top_k, 2)
        router = oracle(Ernie4_5_MoeTopKRouter, draw, moe_norm_min=1e-12)
        with torch.no_grad():
            router.moe_statics.e_score_correction_bias.copy_(draw.bias[None])
        _, weight, expert = router(draw.hidden)

        assert_same(route(softmax(draw, normalize=True, bias_rate=0.001), draw), weight, expert)


def test_deepseek_v3():
    for draw in cases(grouped=True):
        normalize = draw.top_k > 1
        keys = {"n_group": draw.n_groups, "topk_group": draw.groups_per_token, "norm_topk_prob": normalize}
        _, weight, expert = oracle(DeepseekV3TopkRouter, draw, **keys)(draw.hidden)
        groups = {"n_groups": draw.n_groups, "groups_per_token": draw.groups_per_token}

        assert_same(route(sigmoid(draw, route_scale=draw.scale, **groups), draw), weight, expert)


def test_deepseek_v4():
    for draw in cases():
        draw.top_k = max(draw.top_k, 2)
        _, weight, expert = oracle(DeepseekV4TopKRouter, draw, scoring_func="sqrtsoftplus")(draw.hidden)

        router = sigmoid(draw, score_function="sqrtsoftplus", route_scale=draw.scale)
        assert_same(route(router, draw), weight, expert)


def test_minimax_m2():
    for draw in cases():
        draw.top_k = max(draw.top_k, 2)
        _, weight, expert = oracle(MiniMaxM2TopKRouter, draw)(draw.hidden, draw.bias)

        assert_same(route(sigmoid(draw), draw), weight, expert)


def test_llama4():
    for draw in cases():
        router = oracle(Llama4Router, draw)
        draw.bias.zero_()
        scores, logits = router(draw.hidden)
        expert = logits.topk(draw.top_k, dim=-1).indices

        assert_same(route(sigmoid(draw, normalize=False), draw), scores.gather(1, expert), expert)


def test_deepseek_v4_with_a_table(tmp_path):
    vocabulary = 50
    for case, draw in enumerate(cases()):
        draw.top_k = max(draw.top_k, 2)
        table = torch.rand(vocabulary, draw.n_experts, generator=draw.generator).topk(draw.top_k).indices
        token_ids = torch.randint(vocabulary, (len(draw.hidden),), generator=draw.generator)
        file = tmp_path / f"{case}.npy"
        np.save(file, table.numpy())
        router = oracle(DeepseekV4HashRouter, draw, scoring_func="sqrtsoftplus", vocab_size=vocabulary)
        router.tid2eid.copy_(table)
        _, weight, expert = router(draw.hidden, token_ids)
        config = HashConfig(top_k=draw.top_k, file=file, weights="gate", route_scale=draw.scale)

        mine = hash_router(config, dim=draw.dim, n_experts=draw.n_experts)
        assert_same(route(mine, draw, token_ids=token_ids), weight, expert)


@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_of_hugging_face_is_top_k_times_ours(padded):
    for draw in cases():
        n_tokens = len(draw.hidden)
        valid = torch.rand(n_tokens, generator=draw.generator) < 0.7 if padded else torch.ones(n_tokens) > 0
        valid[0] = True
        router = softmax(draw, balance=1.0, balance_scope="microbatch")
        route(router, draw)

        mine = router(draw.hidden, valid).auxiliary["load_balance"] / valid.sum()

        theirs = load_balancing_loss_func((draw.hidden @ draw.weight.T,), draw.n_experts, draw.top_k, valid[None])
        torch.testing.assert_close(draw.top_k * mine, theirs, rtol=1e-5, atol=1e-6)
