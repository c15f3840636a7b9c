"""What a sparse layer declares to be looked at."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import forge_plugins_moe.sites
from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.routers.gated_router import GatedRouter
from forge_plugins_moe.sites import expert_outputs, router_logits, weighted_sum
from forge_plugins_moe.top_k_router import TopKRouter
from forge_testing.model import ModelConformance

SPARSE = {"name": "moe", "n_experts": 4, "hidden_dim": 24, "shared_experts": 1}
DECODER = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}


class TestSparse(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = DECODER | {"feed_forward": SPARSE | {"router": {"name": "softmax_topk", "top_k": 2}}}


class TestSigmoid(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = DECODER | {"feed_forward": SPARSE | {"router": {"name": "sigmoid_topk", "top_k": 3}}}


def layer(**keys):
    builder = ComponentBuilder(discover())
    table = {"name": "moe", "n_experts": 4, "hidden_dim": 24, **keys}
    with torch.device("meta"):
        module = builder(builder.resolve("feed_forward", table), dim=16, layer=0, n_layers=2)
    module.to_empty(device="cpu")
    module.init_weights(SeededInitializer(0), "blocks.0.feed_forward.", 0.3, 0.3)
    return module


def looked_at(module, hidden, valid=None):
    """What the layer gives, what its experts were given, and each expert's output."""
    seen = []
    handle = module.experts.register_forward_hook(lambda _, args, output: seen.append((args[1], output)))
    with torch.no_grad():
        module(hidden, valid)
    handle.remove()
    ((assignments, output),) = seen
    with torch.no_grad():
        return assignments, output, expert_outputs(module.experts, hidden, assignments)


@pytest.mark.parametrize("keys", [{}, {"activation": "clamped_swiglu", "bias": True}, {"hidden_dim": 23}])
def test_each_output_is_that_of_its_expert_alone(keys):
    module = layer(**keys)
    hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))

    assignments, _, found = looked_at(module, hidden)

    experts, hidden = module.experts.double(), hidden.double()
    for row, token, expert in zip(found.flatten(0, 2), assignments.token, assignments.expert, strict=True):
        x = hidden.flatten(0, 1)[token]
        gate, up, down = (stack[expert] for stack in (experts.gate, experts.up, experts.down))
        if experts.up_bias is None:
            expected = down @ (F.silu(gate @ x) * (up @ x))
        else:
            biases = (experts.gate_bias[expert], experts.up_bias[expert], experts.down_bias[expert])
            expected = down @ experts.activate(gate @ x + biases[0], up @ x + biases[1]) + biases[2]
        assert torch.allclose(row.double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_by_their_weights_sum_to_that_of_the_layer(dtype):
    module = layer(router={"name": "softmax_topk", "top_k": 3}).to(dtype)
    hidden = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0)).to(dtype)

    assignments, output, found = looked_at(module, hidden)

    assert found.dtype == dtype
    assert torch.equal(weighted_sum(module.experts, found, hidden, assignments, part=lambda weight: weight), output)


def test_gradients_go_through_what_is_put_back():
    module = layer()
    hidden = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))

    def put_back(experts, args, output):
        given, assignments = args[:2]
        outputs = expert_outputs(experts, given, assignments)
        return weighted_sum(experts, outputs, given, assignments, part=lambda weight: weight)

    gradients = []
    for hooks in ([], [put_back]):
        handles = [module.experts.register_forward_hook(one) for one in hooks]
        module.zero_grad()
        module(hidden).square().sum().backward()
        gradients.append([one.grad.clone() for one in module.parameters()])
        for handle in handles:
            handle.remove()

    for found, expected in zip(*reversed(gradients), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("router", ["softmax_topk", "noisy_topk", "sinkhorn"])
def test_the_routing_that_is_seen_is_the_one_that_is_taken(router):
    """In training, some draw noise: what is looked at is not drawn again, and takes no random number from training."""
    module = layer(router={"name": router, "top_k": 2}).train()
    hidden = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
    sites, taken, seen = module.sites(), [], {}
    module.router.register_forward_hook(lambda _, args, routing: taken.append(routing))

    def look(_, args, output):
        for name in ("routing_expert", "routing_weight"):
            function = getattr(forge_plugins_moe.sites, sites[name].compute.partition(":")[2])
            seen[name] = function(module.experts, *args)

    module.get_submodule(sites["routing_expert"].module).register_forward_hook(look)
    torch.manual_seed(3)
    module(hidden)
    after = torch.rand(1)

    (routing,) = taken
    assert seen["routing_expert"].shape == seen["routing_weight"].shape == (4, 16, 2)
    assert torch.equal(seen["routing_expert"].flatten(), routing.expert)
    assert torch.equal(seen["routing_weight"].flatten(), routing.weight)
    torch.manual_seed(3)
    module.router(hidden.flatten(0, 1))
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("own", [GatedRouter, TopKRouter])
def test_logits_are_those_of_routers_of_either_base(own):
    module = layer()
    keys = {"experts_per_token": 2} if own is GatedRouter else {"top_k": 2}
    module.router = own(dim=16, n_experts=4, **keys)
    hidden = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[True] * 4, [True, False, False, False]])
    hidden[1, 2] = torch.nan

    found = router_logits(module, hidden, valid)

    assert torch.allclose(found[valid], hidden[valid] @ module.router.gate.weight.T, atol=1e-6)
    assert torch.equal(found[~valid], torch.zeros(3, 4))
    assert "router_logits" in module.sites()


def test_padding_has_zeros():
    hidden = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[True, True, True, False]])

    _, _, found = looked_at(layer(), hidden, valid)

    assert (found[0, 3] == 0).all()
    assert (found[0, :3] != 0).any(-1).all()


def test_what_is_dropped_in_training_has_zeros():
    module = layer(capacity_factor=0.5).train()
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))

    assignments, _, found = looked_at(module, hidden)

    dropped = assignments.expert.view(2, 8, -1) == 4
    assert dropped.any()
    assert ((found == 0).all(-1) == dropped).all()
