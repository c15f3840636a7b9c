from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.router import Routing
from forge_core.errors import ConfigError, PluginError
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.capacity import drop_beyond_capacity
from forge_plugins_moe.dispatch import Assignments
from forge_plugins_moe.experts import Experts
from forge_plugins_moe.routers.hash import Hash
from forge_testing.feed_forward import FeedForwardConformance

DIM = 16


class TestDropless(FeedForwardConformance):
    component = "forge-plugins-moe:moe"
    config = {"n_experts": 4, "hidden_dim": 24}


class TestDeepSeek(FeedForwardConformance):
    component = "forge-plugins-moe:moe"
    config = {
        "n_experts": 8,
        "hidden_dim": 12,
        "shared_experts": 2,
        "shared_gate": True,
        "router": {"name": "sigmoid_topk", "top_k": 3, "balance": 0.01, "n_groups": 4, "groups_per_token": 2},
    }


class TestCapacity(FeedForwardConformance):
    component = "forge-plugins-moe:moe"
    config = {"n_experts": 4, "hidden_dim": 24, "capacity_factor": 1.0, "renormalize": True}
    independent_positions = False


class TestTwoMatrices(FeedForwardConformance):
    component = "forge-plugins-moe:moe"
    config = {"n_experts": 4, "hidden_dim": 24, "activation": "gelu", "check_routing": True}


class TestClampedWithBiases(FeedForwardConformance):
    component = "forge-plugins-moe:moe"
    config = {
        "n_experts": 4,
        "hidden_dim": 24,
        "activation": "clamped_swiglu",
        "bias": True,
        "router": {"name": "softmax_topk", "gate_bias": True},
    }


class TestUnaligned(FeedForwardConformance):
    """Rows that ``grouped_mm`` does not take."""

    component = "forge-plugins-moe:moe"
    config = {"n_experts": 4, "hidden_dim": 23}


def build(config, *, layer=0, n_layers=2, std=0.3):
    builder = ComponentBuilder(discover())
    with torch.device("meta"):
        module = builder(builder.resolve("feed_forward", config), dim=DIM, layer=layer, n_layers=n_layers)
    module.to_empty(device="cpu")
    module.init_weights(SeededInitializer(0), "blocks.0.feed_forward.", std, std)
    return module


def moe(**keys):
    return build({"name": "moe", "n_experts": 4, "hidden_dim": 24, **keys})


def given(routing):
    return Assignments(routing.token, routing.expert, routing.weight, routing.top_k)


def hidden(positions=20, dtype=torch.float32):
    return torch.randn(2, positions, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def expert_by_expert(layer, states, routing):
    """float64, one assignment after the other."""
    tokens = states.flatten(0, 1).double()
    output = torch.zeros_like(tokens)
    for token, expert, weight in zip(routing.token, routing.expert, routing.weight.double(), strict=True):
        if expert == layer.config.n_experts:
            continue
        up, down = layer.experts.up[expert].double() @ tokens[token], layer.experts.down[expert].double()
        inner = F.silu(layer.experts.gate[expert].double() @ tokens[token]) * up
        output = output.index_add(0, token[None], (weight * (down @ inner))[None])
    return output.view(states.shape)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("hidden_dim", [24, 23], ids=["grouped", "loop"])
def test_each_token_gets_the_weighted_sum_of_its_experts(dtype, tolerance, hidden_dim):
    layer = moe(hidden_dim=hidden_dim)
    layer.experts.to(dtype)
    states = hidden(dtype=dtype)

    expected = expert_by_expert(layer, states, layer.router(states.flatten(0, 1)))

    assert ((layer(states).double() - expected).norm() / expected.norm()).item() < tolerance


@pytest.mark.parametrize("static", [True, False], ids=["top_k", "any list"])
@pytest.mark.parametrize("hidden_dim", [24, 23], ids=["grouped", "loop"])
def test_gradients_are_those_of_the_formula_also_where_tokens_go_to_none(static, hidden_dim):
    layer = moe(hidden_dim=hidden_dim)
    states = hidden().requires_grad_()
    generator = torch.Generator().manual_seed(2)
    routing = layer.router(states.flatten(0, 1).detach())
    to_none = torch.rand(len(routing.expert), generator=generator) < 0.3
    expert = torch.where(to_none, 4, routing.expert)
    weight = torch.where(to_none, 0, routing.weight).detach().requires_grad_()
    given = Routing(routing.token, expert, weight, {}, {}, 2 if static else None)
    parameters = [states, weight, layer.experts.gate, layer.experts.up, layer.experts.down]

    output = layer.experts(states, Assignments(given.token, expert, weight, given.top_k, some_to_none=True))
    found = torch.autograd.grad(output.square().sum(), parameters)
    expected = torch.autograd.grad(expert_by_expert(layer, states, given).square().sum(), parameters)

    for one, other in zip(found, expected, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-5


CLAMPED = {"activation": "clamped_swiglu", "activation_limit": 0.6, "activation_slope": 1.3}


def biased_expert_by_expert(layer, states, routing):
    """float64, as gpt-oss has it (or SwiGLU, or of two matrices), one assignment after the other."""
    experts, tokens = layer.experts, states.flatten(0, 1).double()
    output = torch.zeros_like(tokens)
    for token, expert, weight in zip(routing.token, routing.expert, routing.weight.double(), strict=True):
        if expert == layer.config.n_experts:
            continue

        def linear(name, x, expert=expert):
            return getattr(experts, name)[expert].double() @ x + getattr(experts, f"{name}_bias")[expert].double()

        up = linear("up", tokens[token])
        if layer.experts.gate is None:
            inner = F.gelu(up)
        elif layer.config.activation is None:
            inner = F.silu(linear("gate", tokens[token])) * up
        else:
            gate, up = linear("gate", tokens[token]).clamp(max=0.6), up.clamp(-0.6, 0.6)
            inner = (up + 1) * gate * torch.sigmoid(1.3 * gate)
        output = output.index_add(0, token[None], (weight * linear("down", inner))[None])
    return output.view(states.shape)


@pytest.mark.parametrize("keys", [CLAMPED, {}, {"activation": "gelu"}], ids=["clamped", "silu", "gelu"])
@pytest.mark.parametrize("hidden_dim", [24, 23], ids=["grouped", "loop"])
def test_experts_with_biases_are_the_formula_also_where_tokens_go_to_none(keys, hidden_dim):
    layer = moe(hidden_dim=hidden_dim, bias=True, **keys)
    biases = [one for name, one in layer.experts.named_parameters() if name.endswith("_bias")]
    generator = torch.Generator().manual_seed(2)
    for bias in biases:
        bias.data.normal_(generator=generator)
    states = hidden().requires_grad_()
    routing = layer.router(states.flatten(0, 1).detach())
    to_none = torch.rand(len(routing.expert), generator=generator) < 0.3
    expert = torch.where(to_none, 4, routing.expert)
    weight = torch.where(to_none, 0, routing.weight).detach().requires_grad_()
    given = Routing(routing.token, expert, weight, {}, {}, 2)
    parameters = [states, weight, layer.experts.up, layer.experts.down, *biases]

    output = layer.experts(states, Assignments(given.token, expert, weight, given.top_k, some_to_none=True))
    formula = biased_expert_by_expert(layer, states, given)

    assert ((output - formula).norm() / formula.norm()).item() < 1e-6
    found = torch.autograd.grad(output.square().sum(), parameters)
    expected = torch.autograd.grad(formula.square().sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-5


def test_parts_of_experts_with_biases_add_up_to_the_whole():
    layer = moe(bias=True, **CLAMPED)
    whole, states = layer.experts, hidden()
    for name, parameter in whole.named_parameters():
        if name.endswith("_bias"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    routing = layer.router(states.flatten(0, 1))
    total = torch.zeros_like(states)
    for part in range(2):
        own = moe(bias=True, **CLAMPED).experts
        for name, parameter in whole.named_parameters():
            dim = whole.feature_dims().get(name)
            own._parameters[name] = parameter if dim is None else torch.nn.Parameter(parameter.chunk(2, dim)[part])
        total = total + own(states, given(routing))

    torch.testing.assert_close(total, whole(states, given(routing)), atol=1e-5, rtol=1e-5)
    assert whole.parameter_roles() == dict.fromkeys(("gate", "up", "down"), "expert") | dict.fromkeys(
        ("gate_bias", "up_bias", "down_bias"), "bias"
    )


def test_biases_are_scaled_with_the_weights_of_their_expert():
    layer, plain = (moe(bias=True, scale_gradients=scaled) for scaled in (True, False))
    layer.before_optimizer_step({"load": torch.tensor([2.0, 4.0, 0.0, 10.0]), "dropped": torch.zeros(4)}, 0.5)

    found, expected = (
        torch.autograd.grad(one(hidden()).square().sum(), one.experts.up_bias)[0] for one in (layer, plain)
    )

    torch.testing.assert_close(found, expected * torch.tensor([2.0, 1.0, 4.0, 0.4])[:, None])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"activation_limit": 3.0}, 'has no effect without activation = "clamped_swiglu"'),
        ({"activation": "silu", "activation_slope": 1.0}, 'has no effect without activation = "clamped_swiglu"'),
        ({"activation": "clamped_swiglu", "gated": False}, "clamped_swiglu has a gate; remove gated, or choose"),
        ({"dense": {"name": "mlp", "activation": "clamped_swiglu"}, "gated": False}, "clamped_swiglu has a gate"),
        ({**CLAMPED, "activation_limit": 0.0}, "activation_limit"),
        ({"activation": "clamped_swiglo"}, "Did you mean 'clamped_swiglu'"),
    ],
)
def test_settings_of_experts_that_contradict_each_other_are_refused(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        moe(**keys)


def test_one_expert_is_the_dense_layer():
    layer = moe(n_experts=1, router={"name": "softmax_topk", "top_k": 1, "order": "softmax_topk"})
    dense = build({"name": "mlp", "hidden_dim": 24})
    for name in ("gate", "up", "down"):
        getattr(dense, name).weight.data = getattr(layer.experts, name).data[0]

    torch.testing.assert_close(layer(hidden()), dense(hidden()), rtol=1e-5, atol=1e-5)


def test_each_expert_begins_as_a_layer_of_its_own_would():
    """Pitfall: one tensor of all experts whose fan or name an initialiser takes for something else."""
    experts = Experts(8, 64, 96, F.silu, gated=True)
    experts.init_weights(SeededInitializer(0), "experts.", residual_std=0.005, std=0.02)

    for name, std in (("gate", 0.02), ("up", 0.02), ("down", 0.005)):
        stack = getattr(experts, name)
        for expert in stack:
            assert math.isclose(expert.std().item(), std, rel_tol=0.05)
        assert len({expert[0, 0].item() for expert in stack}) == 8


def test_shared_experts_are_one_layer_of_their_widths_and_a_gate_scales_it():
    layer = moe(shared_experts=3, shared_gate=True)
    alone = moe()
    alone.load_state_dict({name: value for name, value in layer.state_dict().items() if "shared" not in name})
    states = hidden()

    shared = layer.shared
    inner = F.silu(shared.gate(states)) * shared.up(states)
    expected = alone(states) + torch.sigmoid(shared.share(states)) * shared.down(inner)

    assert shared.up.weight.shape == (72, DIM)
    torch.testing.assert_close(layer(states), expected, rtol=1e-4, atol=1e-5)


def test_experts_have_the_clamp_of_the_dense_layer_and_shared_ones_that_of_routed_ones():
    given, taken = (
        moe(shared_experts=1, shared_gate=True, **keys) for keys in (CLAMPED, {"dense": {"name": "mlp", **CLAMPED}})
    )
    torch.testing.assert_close(given(hidden()), taken(hidden()), rtol=0, atol=0)

    shared, states = given.shared.double(), 9 * hidden().double()
    gate, up = shared.gate(states).clamp(max=0.6), shared.up(states).clamp(-0.6, 0.6)
    inner = (up + 1) * gate * torch.sigmoid(1.3 * gate)
    torch.testing.assert_close(shared(states), torch.sigmoid(shared.share(states)) * shared.down(inner))


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [({}, [0, 1, 2, 3]), ({"every": 2}, [1, 3]), ({"first_dense": 3}, [3]), ({"layers": [0, 2]}, [0, 2])],
)
def test_sparse_layers_are_where_they_are_asked_for(keys, sparse):
    config = {"name": "moe", "n_experts": 4, "dense": {"name": "mlp", "hidden_dim": 40}, **keys}
    layers = [build(config, layer=layer, n_layers=4) for layer in range(4)]

    assert [i for i, layer in enumerate(layers) if hasattr(layer, "router")] == sparse
    assert all(layer.up.weight.shape == (40, DIM) for i, layer in enumerate(layers) if i not in sparse)


def test_an_expert_is_as_wide_as_the_dense_layer_times_a_factor():
    config = {"name": "moe", "n_experts": 4, "dense": {"name": "mlp", "hidden_dim": 40}, "width_factor": 0.25}

    assert build(config).experts.up.shape == (4, 10, DIM)


def test_active_parameters_are_those_of_the_experts_that_a_token_visits():
    layer = moe(n_experts=8, shared_experts=1, router={"name": "softmax_topk", "top_k": 3})

    expert = 3 * 24 * DIM
    assert layer.active_parameters() == 3 * expert + expert + 8 * DIM
    assert sum(p.numel() for p in layer.parameters()) == 8 * expert + expert + 8 * DIM


def counted(layer, states, valid=None):
    LEDGER.start_step(torch.tensor(1.0))
    layer(states.requires_grad_(), valid).square().sum().backward()
    reduced = {name: tensor.clone() for name, tensor in layer.accumulators().items()}
    layer.before_optimizer_step(reduced, 0.5)
    return reduced, layer.step_metrics()


def test_load_is_counted_without_padding_and_reported():
    layer, states = moe(n_experts=2, router={"name": "softmax_topk", "top_k": 1, "order": "softmax_topk"}), hidden()
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 5:] = False
    chosen = layer.router(states.flatten(0, 1)).expert.view(2, 20)[valid]
    counts = torch.bincount(chosen, minlength=2).float()

    reduced, metrics = counted(layer, states, valid)

    assert torch.equal(reduced["load"], counts)
    assert counts.sum() == 25
    share = counts / 25
    assert math.isclose(metrics["load_violation"].item(), counts.max().item() / 12.5 - 1, rel_tol=1e-6)
    assert math.isclose(metrics["load_entropy"].item(), -(share * share.log()).sum().item() / math.log(2), rel_tol=1e-5)
    assert metrics["experts_idle"] == 0
    assert metrics["dropped"] == 0


def test_recomputation_counts_nothing_again():
    layer, states = moe(), hidden().requires_grad_()
    LEDGER.start_step(torch.tensor(1.0))

    torch.utils.checkpoint.checkpoint(layer, states, use_reentrant=False).square().sum().backward()

    assert layer.load.sum() == 2 * 40


@pytest.mark.parametrize("drop", ["weight", "position"])
def test_an_expert_takes_as_many_assignments_as_it_has_room_for_whichever_choice_they_are(drop):
    """Pitfall: room for each of a token's choices, so that an expert is given a multiple of it."""
    keys = {"n_experts": 4, "router": {"name": "softmax_topk", "top_k": 2}}
    layer, states = moe(capacity_factor=0.7, drop=drop, **keys), hidden()
    routing = layer.router(states.flatten(0, 1))
    room = math.ceil(80 / 4 * 0.7)

    assignments, dropped = drop_beyond_capacity(given(routing), 40, layer.config)
    reduced, metrics = counted(layer, states)

    kept = assignments.expert < 4
    for expert in range(4):
        queue = torch.nonzero(routing.expert == expert).flatten()
        if drop == "weight":
            queue = queue[routing.weight[queue].argsort(descending=True, stable=True)]
        assert set(torch.nonzero(kept & (routing.expert == expert)).flatten().tolist()) == set(queue[:room].tolist())
    assert dropped.tolist() == reduced["dropped"].tolist() == routing.expert[~kept].bincount(minlength=4).tolist()
    assert dropped.any()
    assert not assignments.weight[~kept].any()
    assert math.isclose(metrics["dropped"].item(), (~kept).sum().item() / 80, rel_tol=1e-6)
    chosen = routing.expert.bincount(minlength=4)
    assert reduced["load"].tolist() == chosen.tolist(), "balance is of what was chosen, not of what is left"
    assert math.isclose(metrics["load_violation"].item(), chosen.max().item() / 20 - 1, rel_tol=1e-6)


def test_rows_of_no_expert_may_become_anything(monkeypatch):
    compute = Experts.compute

    def careless(self, rows, counts):
        some = torch.arange(len(rows)) < counts.sum()
        return torch.where(some[:, None], compute(self, rows, counts), torch.nan)

    monkeypatch.setattr(Experts, "compute", careless)
    padded = moe()(hidden(), torch.arange(20).expand(2, 20) < 14)
    predicted = moe(router={"name": "expert_choice", "experts_per_token": 1, "predictor": True}).generate(hidden())

    assert padded.isfinite().all()
    assert predicted.isfinite().all()


def test_room_is_rounded_up():
    ten = Assignments(torch.arange(10), torch.zeros(10, dtype=torch.int64), torch.ones(10))

    kept, dropped = drop_beyond_capacity(ten, 10, moe(capacity_factor=1.0).config)

    assert dropped.tolist() == [7, 0, 0, 0]  # 2.5 tokens of each of four experts
    assert kept.expert.tolist() == [0] * 3 + [4] * 7


@pytest.mark.parametrize("factor", [0.5, 1.3333333333333333])
def test_padding_makes_no_room(factor):
    """Promise 3: what a token gets does not depend on padding beside it."""
    layer, states = moe(capacity_factor=factor), hidden()

    alone = layer(states[:, :14])
    padded = layer(states, torch.arange(20).expand(2, 20) < 14)

    torch.testing.assert_close(padded[:, :14], alone)


def test_text_that_is_generated_does_not_depend_on_what_is_generated_beside_it():
    layer, states = moe(capacity_factor=0.5), hidden()[:1].transpose(0, 1)

    together = layer.generate(states)
    alone = torch.cat([layer.generate(one[None]) for one in states])

    torch.testing.assert_close(together, alone)
    assert not torch.allclose(layer(states), together), "in training there is less room"
    torch.testing.assert_close(layer.eval()(states), together)


def test_an_idle_expert_is_not_blown_up_and_a_step_without_tokens_changes_nothing():
    layer = moe(scale_gradients=True)

    for load in (torch.tensor([0.0, 4096.0, 4096.0, 8192.0]), torch.zeros(4)):
        layer.before_optimizer_step({"load": load, "dropped": torch.zeros(4)}, 0.5)

        assert layer.experts.gradient_scale.tolist() == [10, 1, 1, 0.5]
    assert layer.step_metrics()["experts_idle"].isnan()


def test_a_rank_scales_the_gradients_of_its_own_experts():
    experts = moe(scale_gradients=True).experts
    experts.first_expert = 2
    for name in ("gate", "up", "down"):
        setattr(experts, name, nn.Parameter(getattr(experts, name)[2:].detach().clone()))

    def gradient(scales):
        experts.gradient_scale.copy_(torch.tensor(scales))
        output = experts.compute(hidden()[0], torch.tensor([12, 8]))
        return torch.autograd.grad(output.square().sum(), experts.up)[0]

    scaled, plain = gradient([5.0, 6.0, 2.0, 3.0]), gradient([1.0] * 4)
    torch.testing.assert_close(scaled, plain * torch.tensor([2.0, 3.0])[:, None, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_added_in_every_precision(dtype):
    layer = moe(bias=True).to(dtype)
    with torch.no_grad():
        without = layer(hidden(dtype=dtype))
        layer.experts.down_bias.fill_(8.0)
        weight = layer.router(hidden(dtype=dtype).flatten(0, 1)).weight.view(2, 20, -1).sum(2, keepdim=True)

        torch.testing.assert_close(
            layer(hidden(dtype=dtype)).float(), without.float() + 8 * weight, rtol=1e-2, atol=0.1
        )


def test_gradients_are_scaled_by_what_is_left_to_an_expert():
    layer = moe(capacity_factor=1.0, scale_gradients=True)

    load, dropped = torch.tensor([10.0, 2.0, 20.0, 8.0]), torch.tensor([0.0, 0.0, 10.0, 0.0])
    layer.before_optimizer_step({"load": load, "dropped": dropped}, 0.5)

    assert layer.experts.gradient_scale.tolist() == [0.75, 3.75, 0.75, 0.9375]


def test_weights_that_are_left_can_be_scaled_to_their_sum():
    layer = moe(capacity_factor=0.4, renormalize=True)
    routing = layer.router(hidden().flatten(0, 1))

    assignments, _ = drop_beyond_capacity(given(routing), 40, layer.config)

    sums = torch.zeros(40).index_add(0, assignments.token, assignments.weight)
    visited = torch.zeros(40).index_add(0, assignments.token, (assignments.expert < 4).float()) > 0
    assert (~visited).any()
    assert torch.allclose(sums[visited], torch.ones(()))
    assert not sums[~visited].any()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"expert": lambda r: r.expert + 3}, r"the expert [5-6] in Routing.expert, which must lie between 0 and 4"),
        ({"token": lambda r: r.token - 1}, "the token -1 in Routing.token"),
        ({"weight": lambda r: r.weight / 0}, "values in Routing.weight that are not finite"),
        ({"expert": lambda r: r.expert * 0}, "a token twice with the same expert"),
        ({"weight": lambda r: r.weight[1:]}, "80 tokens, 80 experts and 79 weights"),
        ({"top_k": lambda _: 1}, "top_k = 1 and a Routing.token that is not"),
        ({"expert": lambda r: torch.full_like(r.expert, 4)}, "assignments to no expert"),
        ({"auxiliary": lambda _: {"z": torch.tensor(math.nan)}}, "auxiliary loss 'z' that is not finite"),
        ({"auxiliary": lambda _: {"z": torch.ones(()).bfloat16()}}, "auxiliary loss 'z' that is no fp32 scalar"),
        ({"weight": lambda r: r.weight.bfloat16()}, "a Routing.weight in torch.bfloat16, which must be in torch.float"),
        ({"expert": lambda r: r.expert.int()}, "a Routing.expert in torch.int32, which must be in torch.int64"),
        ({"weight": lambda r: r.weight[:, None]}, r"a Routing.weight of the shape \(80, 1\), which must be \(80,\)"),
        ({"weight": lambda r: r.weight.tolist()}, "for 'weight' a list, which must be a tensor"),
        ({"auxiliary": lambda _: {"z": 0.1}}, "for 'z' a float, which must be a tensor"),
        ({"auxiliary": lambda _: None}, "for 'auxiliary' a NoneType, which must be a tensor"),
        (
            {"expert": lambda r: torch.where(r.token == 3, 4, r.expert), "top_k": lambda _: None},
            "a weight of an assignment to no expert in Routing.weight",
        ),
    ],
)
def test_a_router_that_breaks_its_contract_is_named_with_the_tensor(change, sentence):
    layer = moe(check_routing=True)
    route = layer.router.forward

    def broken(*given, **facts):
        routing = route(*given, **facts)
        return routing._replace(**{name: make(routing) for name, make in change.items()})

    layer.router.forward = broken
    name = "forge-plugins-moe:softmax_topk"
    with pytest.raises(PluginError, match=f"router {name} returned .*{sentence}.*bug in the router"):
        layer(hidden())


def test_a_router_that_returns_something_else_is_named():
    layer = moe(check_routing=True)
    layer.router.forward = lambda *_, **__: (torch.zeros(3), torch.zeros(3))

    with pytest.raises(
        PluginError, match="router forge-plugins-moe:softmax_topk returned a tuple, which must be a Routing"
    ):
        layer(hidden())


def test_a_router_that_needs_what_nobody_knows_is_refused_when_it_is_built(monkeypatch):
    monkeypatch.setattr(Hash, "needs", frozenset({"token_ids", "positions"}))

    with pytest.raises(PluginError, match=r"moe:hash needs 'positions'; .* given token_ids, sequence, noise. .* a bug"):
        moe(router="hash")


def test_padding_that_is_routed_is_named():
    layer = moe(check_routing=True)
    route = layer.router.forward
    layer.router.forward = lambda tokens, valid=None, **facts: route(tokens, **facts)

    with pytest.raises(PluginError, match="an assignment of padding"):
        layer(hidden(), torch.arange(40).view(2, 20) > 3)


def test_experts_need_a_width():
    config = {"name": "moe", "n_experts": 4, "dense": {"name": "moe", "n_experts": 2, "layers": [9]}}

    with pytest.raises(ConfigError, match="hidden_dim: say how wide an expert is, as the layer 'moe' does not"):
        build(config)


def test_gradients_of_experts_can_be_scaled_by_their_load_in_the_step_before():
    """Pitfall: scaling what experts give, so that training and evaluation are two functions."""
    layer, plain = moe(scale_gradients=True), moe()
    states = hidden()
    assert torch.equal(layer.eval()(states), plain.eval()(states))
    load = torch.tensor([2.0, 4.0, 0.0, 10.0])

    layer.before_optimizer_step({"load": load, "dropped": torch.zeros(4)}, 0.5)
    gradients = [
        torch.autograd.grad(
            one(states.requires_grad_()).square().sum(), [one.experts.up, one.router.gate.weight, states]
        )
        for one in (layer, plain)
    ]

    (up, gate, into), (plain_up, plain_gate, plain_into) = gradients
    torch.testing.assert_close(up, plain_up * torch.tensor([2.0, 1.0, 4.0, 0.4])[:, None, None])
    assert torch.equal(gate, plain_gate)
    assert torch.equal(into, plain_into)
    assert torch.equal(layer(states), plain(states))
    assert "experts.gradient_scale" in layer.state_dict(), "a resumed run goes on with it"


def test_a_router_that_looks_ahead_cannot_generate_without_another_one_that_does_not():
    layer = moe(router={"name": "expert_choice"})
    facts = {"sequence": torch.arange(2)[:, None].expand(2, 20) * 20}

    with pytest.raises(
        ConfigError, match="the router expert_choice chooses among later tokens too, and cannot generate"
    ):
        layer.generate(hidden(), **facts)

    able = moe(router={"name": "expert_choice", "predictor": True})
    assert able.generate(hidden(), **facts).shape == hidden().shape
