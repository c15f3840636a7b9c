"""The FLOPs that a decoder says it takes against those that torch counts in a step."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_plugins_optim.cross_entropy import CrossEntropy

LATENT = {"name": "latent", "kv_rank": 12, "plain_dim": 12, "rotary_dim": 8, "value_dim": 10, "q_rank": 11}
SPARSE = {"name": "moe", "n_experts": 8, "hidden_dim": 24, "router": {"name": "softmax_topk", "top_k": 2}}
SHARED = SPARSE | {"shared_experts": 2, "shared_gate": True, "first_dense": 1}


@pytest.mark.parametrize(
    "keys",
    [
        {"head_dim": 16},
        {"feed_forward": {"name": "mlp", "hidden_dim": 40, "activation": "gelu", "gated": False}},
        {"mixer": LATENT, "n_kv_heads": 4},
        {"feed_forward": SPARSE},
        {"feed_forward": SHARED},
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts(keys, decoder):
    tokens = torch.randint(50, (2, 25), generator=torch.Generator().manual_seed(0))
    model = decoder(**keys).train()

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens[:, :-1], tokens[:, 1:], CrossEntropy()).total.backward()

    assert counter.get_total_flops() == tokens[:, 1:].numel() * model.flops_per_token(24)
