"""What docs/moe.md says about the coefficient of Hugging Face's balance loss."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from forge_plugins_moe.routers.loss import load_balance

LAYERS, TOKENS, EXPERTS, TOP_K = 3, 50, 8, 2


def ours(logits: torch.Tensor) -> torch.Tensor:
    """The loss of one layer, a mean over tokens."""
    probability = logits.softmax(-1)
    load = F.one_hot(probability.topk(TOP_K).indices, EXPERTS).sum((0, 1)).float()
    return load_balance(probability, load, None) / TOKENS


def test_a_coefficient_times_top_k_over_layers_is_the_same_gradient_where_layers_are_equally_loaded():
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    layers = [logits.clone().requires_grad_() for _ in range(LAYERS)]

    theirs = torch.autograd.grad(0.02 * load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K), layers)
    balance = 0.02 * TOP_K / LAYERS
    mine = torch.autograd.grad(balance * sum(map(ours, layers)), layers)

    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_theirs_lets_one_layer_make_up_for_another_and_ours_does_not():
    busy = torch.zeros(TOKENS, EXPERTS)
    busy[:, :TOP_K] = 9
    layers = [busy.roll(TOP_K * n, 1) for n in range(EXPERTS // TOP_K)]

    assert load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K).item() == pytest.approx(TOP_K)
    assert ours(layers[0]).item() == pytest.approx(EXPERTS / TOP_K, rel=1e-2)
