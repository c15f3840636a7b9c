"""What the coefficient of Hugging Face's balance loss is here: as docs/moe.md says, and as it is read and written."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_plugins_moe.huggingface import config_from_hf, hf_config
from forge_plugins_moe.routers.loss import load_balance

LAYERS, TOKENS, EXPERTS, TOP_K = 3, 50, 8, 2
SHAPE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "router_aux_loss_coef": 0.02,
    "vocab_size": 50,
}
MIXTRAL = {**SHAPE, "architectures": ["MixtralForCausalLM"], "intermediate_size": 16, "num_local_experts": EXPERTS}
OLMOE = {**SHAPE, "architectures": ["OlmoeForCausalLM"], "intermediate_size": 16, "num_experts": EXPERTS}
QWEN3 = {
    **SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": EXPERTS,
}
MODELS = [  # each with as many sparse layers
    pytest.param({**MIXTRAL, "num_hidden_layers": LAYERS}, id="mixtral"),
    pytest.param({**OLMOE, "num_hidden_layers": LAYERS}, id="olmoe"),
    pytest.param({**QWEN3, "num_hidden_layers": LAYERS}, id="qwen3"),
    pytest.param({**QWEN3, "num_hidden_layers": 2 * LAYERS, "decoder_sparse_step": 2}, id="qwen3, every second"),
    pytest.param({**QWEN3, "num_hidden_layers": LAYERS + 2, "mlp_only_layers": [0, 3]}, id="qwen3, two dense"),
]


def ours(logits: torch.Tensor) -> torch.Tensor:
    """The loss of one layer, a mean over tokens."""
    probability = logits.softmax(-1)
    load = F.one_hot(probability.topk(TOP_K).indices, EXPERTS).sum((0, 1)).float()
    return load_balance(probability, load, None) / TOKENS


@pytest.mark.parametrize("model", MODELS)
def test_a_coefficient_that_is_read_gives_the_same_gradient_where_layers_are_equally_loaded(model):
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    layers = [logits.clone().requires_grad_() for _ in range(LAYERS)]

    theirs = torch.autograd.grad(0.02 * load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K), layers)
    balance = config_from_hf(model)["feed_forward"]["router"]["balance"]
    mine = torch.autograd.grad(balance * sum(map(ours, layers)), layers)

    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("model", MODELS)
def test_a_coefficient_that_was_read_is_written_as_it_was(model):
    config = ComponentBuilder(discover()).resolve("model", {"name": "transformer", **config_from_hf(model)}).config

    assert hf_config(config, vocab_size=50)["router_aux_loss_coef"] == pytest.approx(0.02)


def test_theirs_lets_one_layer_make_up_for_another_and_ours_does_not():
    busy = torch.zeros(TOKENS, EXPERTS)
    busy[:, :TOP_K] = 9
    layers = [busy.roll(TOP_K * n, 1) for n in range(EXPERTS // TOP_K)]

    assert load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K).item() == pytest.approx(TOP_K)
    assert ours(layers[0]).item() == pytest.approx(EXPERTS / TOP_K, rel=1e-2)
