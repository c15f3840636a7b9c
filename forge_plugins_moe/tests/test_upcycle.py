"""Upcycling in memory: what a sparse model computes that was made of a dense one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge_core.errors import ConfigError
from forge_plugins_moe.feed_forward import MoE
from forge_plugins_moe.upcycle import UpcycledState, Upcycling

MLP = {"name": "mlp", "hidden_dim": 48}


def moe(n_experts: int = 4, router: str | dict[str, Any] = "softmax_topk", **keys: Any) -> dict[str, Any]:
    return {"name": "moe", "n_experts": n_experts, "router": router, "dense": MLP} | keys


@pytest.fixture
def dense(decoder):
    return decoder()


@pytest.fixture
def upcycle(decoder, dense):
    """The sparse model, and the state that it was filled with."""

    def make(layer: dict[str, Any], *, source=None, **how: Any):
        sparse = decoder(feed_forward=layer, seed=None)
        state = UpcycledState((source or dense).state_dict(), sparse, Upcycling(**how))
        sparse = decoder(feed_forward=layer)
        sparse.load_state_dict(dict(state))
        return sparse, state

    return make


@torch.no_grad()
def difference(one, other, tokens) -> float:
    logits, expected = one(tokens), other(tokens)
    return ((logits - expected).norm() / expected.norm()).item()


PRESERVING = {
    "copy": (moe(), {}),
    "copy, every weight by itself": (moe(router={"name": "softmax_topk", "top_k": 4, "order": "softmax_topk"}), {}),
    "copy, weights of another sum": (moe(router={"name": "softmax_topk", "route_scale": 2.5}), {}),
    "copy, sigmoid with groups": (
        moe(8, {"name": "sigmoid_topk", "top_k": 2, "n_groups": 4, "groups_per_token": 2, "route_scale": 2.5}),
        {},
    ),
    "copy, a hash": (moe(router={"name": "hash", "top_k": 2}), {}),
    "copy, some layers": (moe(first_dense=1), {}),
    "copy, gradients scaled by load": (moe(scale_gradients=True), {}),
    "copy, without a gate": (moe(activation="relu", dense={**MLP, "activation": "relu"}), {}),
    "copy, GeGLU": (moe(dense={**MLP, "activation": "gelu_tanh", "gated": True}), {}),
    "copy, within limits": (moe(dense={**MLP, "activation": "clamped_swiglu", "activation_limit": 3.0}), {}),
    "granular 2": (moe(8, {"name": "softmax_topk", "top_k": 4}, hidden_dim=24), {"granularity": 2}),
    "granular 4, one copy": (moe(8, {"name": "sigmoid_topk", "top_k": 4}, width_factor=0.25), {"granularity": 4}),
    "granular 2, all copies, every weight by itself": (
        moe(8, {"name": "softmax_topk", "top_k": 8, "order": "softmax_topk"}, hidden_dim=24),
        {"granularity": 2},
    ),
}


@pytest.mark.parametrize("name", PRESERVING)
def test_a_sparse_model_begins_with_the_logits_of_the_dense_one(name, decoder, upcycle, tokens):
    layer, how = PRESERVING[name]
    source = decoder(feed_forward=layer["dense"])

    sparse, state = upcycle(layer, source=source, **how)

    assert state.preserves
    assert difference(sparse, source, tokens) < 2e-6


def test_weights_whose_sum_depends_on_the_token_are_scaled_by_their_mean_and_reported(dense, upcycle, tokens):
    layer = moe(8, {"name": "softmax_topk", "top_k": 2, "order": "softmax_topk"})

    sparse, state = upcycle(layer)

    assert not state.preserves
    (first, *_) = state.layers.values()
    assert first.scale == pytest.approx(2.0, rel=0.5)
    assert first.spread > 0.1
    scaled = difference(sparse, dense, tokens)
    for name, one in state.layers.items():
        sparse.get_submodule(name).experts.down.data /= one.scale
    assert scaled < 0.7 * difference(sparse, dense, tokens)


def test_capacity_may_drop_tokens_and_is_not_called_preserving(upcycle):
    assert not upcycle(moe(capacity_factor=4.0))[1].preserves


@pytest.mark.parametrize(("spread", "error"), [(0.2, 0.041), (1.0, 0.075)])
def test_the_cube_root_of_the_scale_on_all_three_matrices_is_off_by_percents(decoder, spread, error):
    """4.1 % where gates are of standard deviation 0.2, up to 8 % where they are larger: SwiGLU is no monomial."""
    dim, width = 64, 256
    how = {"dim": dim, "n_heads": 4, "n_layers": 1}
    torch.manual_seed(0)
    source = {name: tensor.clone() for name, tensor in decoder(**how, feed_forward=wide(width)).state_dict().items()}
    source["blocks.0.feed_forward.gate.weight"].normal_(0, spread / dim**0.5)
    layer = moe(4, {"name": "softmax_topk", "top_k": 2}, hidden_dim=width // 2, dense=wide(width))
    hidden = torch.randn(1, 512, dim)
    gate, up, down = (source[f"blocks.0.feed_forward.{name}.weight"] for name in ("gate", "up", "down"))
    expected = (F.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T

    errors = {}
    for scale in ("down_only", "cbrt"):
        sparse = decoder(**how, feed_forward=layer, seed=None)
        state = UpcycledState(source, sparse, Upcycling(granularity=2, scale=scale))
        assert state.preserves is (scale == "down_only")
        filled = decoder(**how, feed_forward=layer)
        filled.load_state_dict(dict(state))
        with torch.no_grad():
            errors[scale] = ((filled.blocks["0"].feed_forward(hidden) - expected).norm() / expected.norm()).item()

    assert errors["down_only"] < 1e-6
    assert errors["cbrt"] == pytest.approx(error, rel=0.1)


def wide(width: int) -> dict[str, Any]:
    return {"name": "mlp", "hidden_dim": width}


def test_dropped_features_start_anew_with_the_statistics_of_those_they_replace(decoder):
    source = decoder(dim=64, feed_forward=wide(400)).state_dict()
    layer = moe(3, dense=wide(400))
    for name in ("gate", "up", "down"):  # so that the mean shows
        source[f"blocks.0.feed_forward.{name}.weight"].add_(0.3)

    state = UpcycledState(source, decoder(dim=64, feed_forward=layer, seed=None), Upcycling(drop=0.25))

    changed = []
    for name in ("gate", "up", "down"):
        axis = 0 if name == "down" else 1
        dense, stack = source[f"blocks.0.feed_forward.{name}.weight"], state[f"blocks.0.feed_forward.experts.{name}"]
        anew = [(expert != dense).any(axis) for expert in stack]
        assert all((expert != dense).all(axis).equal(features) for expert, features in zip(stack, anew, strict=True))
        changed.append(torch.stack(anew))
        drawn = torch.cat([(expert if axis else expert.T)[f] for expert, f in zip(stack, anew, strict=True)])
        replaced = torch.cat([(dense if axis else dense.T)[f] for f in anew])
        assert drawn.mean().item() == pytest.approx(replaced.mean().item(), abs=0.01)
        assert drawn.std().item() == pytest.approx(replaced.std().item(), rel=0.03)
    gate, *others = changed
    assert gate.sum(1).tolist() == [100, 100, 100]
    assert not gate[0].equal(gate[1])  # each expert has features of its own
    assert all(gate.equal(other) for other in others)  # and the same ones in all matrices
    assert not state.preserves


def test_the_seed_decides_routers_and_what_is_drawn(decoder, dense):
    def state(seed):
        sparse = decoder(feed_forward=moe(), seed=None)
        return dict(UpcycledState(dense.state_dict(), sparse, Upcycling(drop=0.5, seed=seed)))

    once, again, other = state(1), state(1), state(2)

    assert all(torch.equal(again[name], tensor) for name, tensor in once.items())
    assert {name for name, tensor in once.items() if not torch.equal(other[name], tensor)} == {
        f"blocks.{layer}.feed_forward.{name}"
        for layer in (0, 1)
        for name in ("router.gate.weight", "experts.gate", "experts.up", "experts.down")
    }


def test_parts_of_a_copy_are_told_apart_by_training(upcycle, tokens):
    """Equal rows of a router get different gradients, as the parts compute different things."""
    sparse, _ = upcycle(moe(8, {"name": "softmax_topk", "top_k": 4}, hidden_dim=24), granularity=2)
    sparse(tokens).square().sum().backward()

    layer = sparse.blocks["0"].feed_forward
    assert isinstance(layer, MoE)
    rows, gradients = layer.router.gate.weight, layer.router.gate.weight.grad
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert not torch.allclose(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("layer", "how", "words"),
    [
        (moe(shared_experts=1), {}, "shared_experts = 0"),
        (moe(6, hidden_dim=12), {"granularity": 4}, "6 experts are not whole copies"),
        (moe(8), {"granularity": 2}, r"has shape \(48, 32\), and 2 parts as wide as .* make \(96, 32\)"),
        (moe(8, {"name": "softmax_topk", "top_k": 3}, hidden_dim=24), {"granularity": 2}, "multiple of 2"),
        (moe(8, {"name": "hash", "top_k": 2}, hidden_dim=24), {"granularity": 2}, "go by its scores alone"),
        (moe(8, {"name": "noisy_topk", "top_k": 4}, hidden_dim=24), {"granularity": 2}, "without noise"),
        (moe(bias=True), {}, "bias of experts does not come from a dense layer; leave out bias"),
        (moe(activation="clamped_swiglu"), {}, "leave out activation in the sparse model"),
        (moe(activation="gelu", gated=True), {}, "leave out activation in the sparse model"),
        (moe(gated=False), {}, r"the sparse one has no blocks\.0\.feed_forward\.gate\.weight"),
        (moe(8, hidden_dim=24, gated=False), {"granularity": 2, "scale": "cbrt"}, "three matrices of SwiGLU"),
        (MLP, {}, "no layer with experts"),
    ],
)
def test_what_cannot_be_is_refused(layer, how, words, decoder, dense):
    with pytest.raises(ConfigError, match=words):
        UpcycledState(dense.state_dict(), decoder(feed_forward=layer, seed=None), Upcycling(**how))


def test_models_that_differ_elsewhere_are_refused(decoder, dense):
    with pytest.raises(ConfigError, match=r"the dense model has no blocks\.2\.feed_forward"):
        UpcycledState(dense.state_dict(), decoder(feed_forward=moe(), n_layers=3, seed=None), Upcycling())
    with pytest.raises(ConfigError, match=r"the sparse one has no blocks\.1\.attention"):
        UpcycledState(dense.state_dict(), decoder(feed_forward=moe(), n_layers=1, seed=None), Upcycling())


def test_a_head_of_its_own_is_not_lost_in_a_tied_one(decoder, tokens):
    tied, sparse = decoder(tie_embeddings=True), decoder(tie_embeddings=True, feed_forward=moe())
    sparse.load_state_dict(dict(UpcycledState(tied.state_dict(), sparse, Upcycling())), strict=False)
    assert difference(sparse, tied, tokens) < 1e-5

    with pytest.raises(ConfigError, match=r"the sparse one has no head\.weight"):
        UpcycledState(decoder().state_dict(), sparse, Upcycling())


def test_a_scale_that_nothing_is_scaled_by_is_refused():
    with pytest.raises(ValueError, match="granularity = 1"):
        Upcycling(scale="cbrt")
