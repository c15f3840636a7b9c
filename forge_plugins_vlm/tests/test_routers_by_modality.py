"""Routers of text and of images in which tokens choose: each balances its own experts by its own tokens."""

from __future__ import annotations

import pytest
import torch
from small_vlm import entries, images

from forge_core.ops.auxiliary_loss import LEDGER

BALANCE, Z, RATE = 0.3, 0.1, 0.01
ROUTERS = {
    "softmax_topk": {"name": "softmax_topk", "balance_counts": "routed", "bias_rate": RATE},
    "sigmoid_topk": {"name": "sigmoid_topk", "balance_counts": "routed", "bias_rate": RATE},
}
PLACES = {
    "mixture_of_transformers": ("feed_forward", "image.feed_forward"),
    "moma": ("feed_forward", "image_feed_forward"),
}
"""The layers of text and of images in a block."""


@pytest.fixture(params=PLACES)
def fusion(request):
    return request.param


@pytest.fixture(params=ROUTERS)
def layers(request, fusion, make_model):
    """The model, its layer of text and that of images, whose biases take part in the choice."""
    router = ROUTERS[request.param] | {"top_k": 2, "balance": BALANCE, "balance_scope": "microbatch", "z_loss": Z}
    experts = {"name": "moe", "n_experts": 4, "hidden_dim": 8, "router": router}
    keys = {"fusion": {"name": fusion} | ({"image": experts} if fusion == "moma" else {}), "feed_forward": experts}
    model = make_model(**keys, n_layers=1, init_std=0.3).train()
    layers = [model.blocks["0"].get_submodule(place) for place in PLACES[fusion]]
    for seed, layer in enumerate(layers):
        layer.router.bias.copy_(0.2 * torch.rand(4, generator=torch.Generator().manual_seed(seed)))
    return model, *layers


def row(layout):
    """A row, of which the last position is padding."""
    given = entries("moma", layout)
    length = given["image_slots"].shape[1]
    given["positions"] = torch.tensor([[*range(length - 1), -1]])
    given["tokens"] = torch.randint(0, 31, (1, length), generator=torch.Generator().manual_seed(3))
    return given | ({"pixels": images(1, tiles)} if (tiles := layout.count("I")) else {})


def trained_by_auxiliary_losses(model, given):
    """One backward, in which the task has no gradient; returns what each router has been given, by the router."""
    read = {}
    for router in (one for name, one in model.named_modules() if name.endswith(".router")):
        router.register_forward_pre_hook(lambda router, args: read.setdefault(router, args))
    LEDGER.start_step(torch.tensor(1.0))
    (0 * model(**given)).sum().backward()
    return read


def expected(router, hidden, valid):
    """In float64 and from the papers' formulas: both losses, the gradient of the gate's weight, and the load."""
    weight = router.gate.weight.detach().double().requires_grad_()
    logits = hidden.detach().double()[valid] @ weight.T
    scores = logits.softmax(-1) if router.score_function == "softmax" else logits.sigmoid()
    probability = scores / scores.sum(-1, keepdim=True)
    load = torch.zeros(4, dtype=torch.float64)
    for token in (scores.detach() + router.bias).tolist():
        for expert in sorted(range(4), key=lambda one: -token[one])[:2]:
            load[expert] += 1
    fraction = load / load.sum().clamp(min=1)
    balance = BALANCE * 4 * (fraction * probability).sum()
    z = Z * logits.exp().sum(-1).log().square().sum()
    return balance, z, torch.autograd.grad(balance + z, weight)[0], load


@pytest.mark.parametrize("layout", ["tItttIt", "tttttt", "It"])
def test_losses_and_loads_are_those_of_the_tokens_of_a_modality(layers, layout):
    """The last row has no token of text that is not padding, the one before it none of images."""
    model, text, image = layers
    given = row(layout)

    read = trained_by_auxiliary_losses(model, given)

    there, of_image = given["positions"][0] >= 0, given["image_slots"][0] != -1
    sums = torch.zeros(2, dtype=torch.float64)
    for layer, own in ((text, there & ~of_image), (image, there & of_image)):
        hidden, valid = read[layer.router]
        assert valid.tolist() == own.tolist()
        balance, z, gradient, load = expected(layer.router, hidden, own)
        torch.testing.assert_close(layer.router.gate.weight.grad, gradient.float(), rtol=1e-4, atol=1e-5)
        assert gradient.any() == own.any()
        assert layer.load.tolist() == layer.router.load.tolist() == load.tolist()
        sums += torch.stack((balance, z)).detach()
    found = LEDGER.means()
    assert [found[name].item() for name in ("load_balance", "router_z")] == pytest.approx(sums.tolist(), rel=1e-5)


def test_each_bias_moves_by_the_load_of_its_own_modality(layers):
    model, *both = layers
    trained_by_auxiliary_losses(model, row("tItttIt"))
    assert both[0].load.tolist() != both[1].load.tolist()

    for layer in both:
        before = layer.router.bias.clone()
        layer.router.before_optimizer_step(layer.router.accumulators(), 0.5)
        expected = before + RATE * (layer.load.mean() - layer.load).sign()
        torch.testing.assert_close(layer.router.bias, expected)
