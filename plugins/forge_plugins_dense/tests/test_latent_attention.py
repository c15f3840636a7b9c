"""Latent attention; that its logits are those of DeepSeek-V3 is tested with the sparse layers that come with it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.latent_config import LatentAttentionConfig
from forge_plugins_dense.rope import rotary_tables

LATENT = {"kv_rank": 24, "q_rank": 16, "plain_dim": 8, "rotary_dim": 4, "value_dim": 12}


@pytest.fixture
def model(tiny_model, latent):
    return tiny_model(n_kv_heads=None, mixer=latent(**LATENT))


@torch.no_grad()
def test_it_is_attention_with_the_keys_and_values_that_the_latent_gives(model):
    """One layer, written out in float64."""
    attention = model.double().blocks["0"].attention
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = dict(attention.named_parameters())

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight[name]

    def turn(x):  # (S, 4): pairs (0, 2) and (1, 3)
        angle = torch.arange(6)[:, None] * 10_000.0 ** (-torch.arange(2) / 2)
        first, second = x[:, :2], x[:, 2:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    x = hidden[0]
    q = (norm(x @ weight["q_down.weight"].T, "q_norm.weight") @ weight["q.weight"].T).view(6, 4, 12)
    down = x @ weight["kv_down.weight"].T
    kv = (norm(down[:, :24], "kv_norm.weight") @ weight["kv_up.weight"].T).view(6, 4, 20)
    heads = []
    for head in range(4):
        queries = torch.cat([q[:, head, :8], turn(q[:, head, 8:])], -1)
        keys = torch.cat([kv[:, head, :8], turn(down[:, 24:])], -1)
        scores = queries @ keys.T / 12**0.5 + torch.full((6, 6), -torch.inf).triu(1)
        heads.append(scores.softmax(-1) @ kv[:, head, 8:])
    expected = torch.cat(heads, -1) @ weight["o.weight"].T

    surroundings = BlockInputs(*rotary_tables(torch.arange(6)[None], 4, 10_000.0), causal=True)
    # angles and their products are in fp32
    torch.testing.assert_close(attention(hidden, surroundings)[0], expected, atol=1e-6, rtol=1e-5)


class Calls(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_padded_values_give_the_same_and_let_the_flash_kernel_take_them(tiny_model, latent, tokens):
    narrow = LATENT | {"value_dim": 8}
    logits, gradients, kernels = [], [], []
    for keys, backend in ((narrow, "auto"), (narrow | {"pad_values": True}, "flash")):
        model = tiny_model(n_kv_heads=None, mixer=latent(**keys), attention=backend).double()
        with Calls() as calls:
            logits.append(model(tokens))
        logits[-1].square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        kernels.append("aten::_scaled_dot_product_flash_attention_for_cpu" in calls.names)

    assert kernels == [False, True]
    torch.testing.assert_close(*logits, atol=1e-6, rtol=1e-6)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_the_cache_keeps_the_latent_and_the_shared_keys(model, tokens):
    cache = model.make_cache(2, 24)
    model(tokens, cache=cache)

    kept = cache.layers["0"]
    assert (kept.k.shape, kept.v.shape) == ((2, 1, 24, 24), (2, 1, 24, 4))


def test_what_is_computed_is_counted(model, tiny_model, latent):
    attention = sum(p.numel() for name, p in model.named_parameters() if ".attention." in name and "norm" not in name)
    rest = (
        sum(p.numel() for name, p in model.named_parameters() if ".feed_forward." in name) + model.head.weight.numel()
    )
    scores_and_sums = 2 * 4 * (12 + 12) / 2 * 24  # layers, heads, features of keys and of values, positions

    assert model.flops_per_token(24) == 6 * (attention + rest) + 12 * scores_and_sums
    windowed = tiny_model(n_kv_heads=None, mixer=latent(**LATENT), window=6)
    assert windowed.flops_per_token(24) == 6 * (attention + rest) + 12 * scores_and_sums / 4


def test_a_kernel_without_values_of_another_width_is_refused(tiny_config, latent):
    keys = {"n_kv_heads": None, "attention": "flash"}
    with pytest.raises(ValueError, match="64 and 192 features; choose another kernel, or set pad_values of the mixer"):
        tiny_config(mixer=latent(value_dim=64), **keys)
    with pytest.raises(ValueError, match=r"256 and 192 features; choose another kernel$"):
        tiny_config(mixer=latent(value_dim=256), **keys)
    assert tiny_config(mixer=latent(value_dim=64, pad_values=True), **keys).narrowest_head == 192


def test_keys_that_no_heads_can_have_are_refused():
    with pytest.raises(ValueError, match="pads values to the 12 features of a key, and they have 12; leave it out"):
        LatentAttentionConfig(**LATENT, pad_values=True)
    with pytest.raises(ValueError, match="must be even, because rotary embeddings turn pairs of features; got 3"):
        LatentAttentionConfig(rotary_dim=3)


def test_heads_need_not_divide_the_width(tiny_config, latent):
    assert tiny_config(n_kv_heads=None, n_heads=5, mixer=latent(**LATENT)).head_size == 12
