"""``TopKRouter``, the base of routers of one's own: a subclass says scores, and the rest is done."""

from __future__ import annotations

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.top_k_router import TopKRouter
from forge_testing.router import RouterConformance


class Halved(TopKRouter):
    def scores(self, hidden):
        return super().scores(hidden) / 2


class TestHalved(RouterConformance):
    def make(self, *, dim, n_experts):
        return Halved(dim=dim, n_experts=n_experts, top_k=3)


def router(**keys):
    made = Halved(dim=6, n_experts=4, **keys)
    made.init_weights(SeededInitializer(0), "router.", 0.5)
    return made


def test_a_token_goes_to_the_experts_with_the_highest_scores_which_are_its_weights():
    hidden = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    made = router(top_k=2)

    routing = made(hidden)

    scores = (hidden.double() @ made.gate.weight.double().T).sigmoid() / 2
    weight, expert = scores.topk(2)
    assert torch.equal(routing.expert.view(7, 2), expert)
    assert torch.equal(routing.token.view(7, 2), torch.arange(7)[:, None].expand(7, 2))
    torch.testing.assert_close(routing.weight.view(7, 2).double(), weight, rtol=1e-6, atol=0)


def test_what_stands_in_padding_reaches_neither_weights_nor_gradients():
    hidden = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    hidden[2:] = torch.nan
    valid = torch.tensor([True, True, False, False])
    made, alone = router(), router()

    routing = made(hidden, valid)
    routing.weight.sum().backward()
    alone(hidden[:2]).weight.sum().backward()

    assert torch.equal(routing.expert[4:], torch.full((4,), 4))
    assert torch.equal(made.gate.weight.grad, alone.gate.weight.grad)


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"router.top_k = 5 is more than the 4 experts of the layer"):
        router(top_k=5)
