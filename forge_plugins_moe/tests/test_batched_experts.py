"""Experts in bf16 on the CPU against each expert alone."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from forge_plugins_dense.activation import FUNCTIONS
from forge_plugins_moe.batched_experts import ACTIVATIONS, _Layout, batched_experts, in_batches
from forge_plugins_moe.experts import Experts
from forge_plugins_moe.feed_forward import MoE

DIM, HIDDEN, REST = 16, 24, 2
LOADS = {
    "unlike each other": [33, 0, 1, 64],
    "one has nearly all": [700, 3, 0, 0, 5, 31, 32, 64],
    "alike": [60, 64, 58, 61, 63, 64],
    "one expert": [5],
    "none": [0, 0, 0],
    "more zeros than rows": [161, 1, 1, 129],
}


def stacks(n_experts, activation):
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate": (HIDDEN, DIM), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
    if activation != "silu":
        del shapes["gate"]
    return {
        name: (0.3 * torch.randn(n_experts, *shape, generator=generator)).bfloat16().requires_grad_()
        for name, shape in shapes.items()
    }


def rows_and_gradient(counts):
    """Of experts, and of none in the end."""
    generator = torch.Generator().manual_seed(0)
    rows, gradient = torch.randn(2, sum(counts) + REST, DIM, generator=generator).bfloat16()
    gradient[sum(counts) :] = 0
    return rows.requires_grad_(), gradient


def alone(rows, counts, activation, *, up, down, gate=None):
    """In fp32."""
    outputs = []
    for index, part in enumerate(rows[: sum(counts)].split(counts)):
        raised = part.float() @ up[index].float().T
        if gate is None:
            hidden = FUNCTIONS[activation](raised)
        else:
            hidden = FUNCTIONS[activation](part.float() @ gate[index].float().T) * raised
        outputs.append(hidden @ down[index].float().T)
    return torch.cat([*outputs, rows.new_zeros(REST, DIM)])


def batched(rows, counts, activation, *, up, down, gate=None):
    return batched_experts(rows, torch.tensor(counts), gate, up, down, activation)


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS.keys())
def test_outputs_and_gradients_are_those_of_each_expert_alone(counts, activation):
    rows, gradient = rows_and_gradient(counts)
    weights = stacks(len(counts), activation)
    inputs = [rows, *weights.values()]

    found = batched(rows, counts, activation, **weights)
    expected = alone(rows, counts, activation, **weights)

    assert not found[sum(counts) :].any()
    every = zip(
        ["output", "rows", *weights],
        [found, *torch.autograd.grad(found, inputs, gradient)],
        [expected, *torch.autograd.grad(expected, inputs, gradient.float())],
        strict=True,
    )
    for name, one, other in every:
        difference = (one - other).float().norm() / other.float().norm().clamp(min=1e-9)
        assert difference < 1e-2, f"{name}: bf16 has 8 bits"


def test_every_activation_of_the_dense_layer_is_batched():
    assert ACTIVATIONS.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_activation_and_its_backward_are_those_of_the_function(name):
    """In float64: bf16 does not tell a GELU from its approximation."""
    x = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    activate, backward = ACTIVATIONS[name]
    expected = FUNCTIONS[name](x)

    found = activate(x.detach(), out=torch.empty_like(x))

    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(expected, x, x.detach().sin())
    torch.testing.assert_close(backward(x.detach().sin(), x.detach()), gradient)


def test_experts_in_bf16_are_batched_and_others_are_not(monkeypatch):
    called = []
    monkeypatch.setattr("forge_plugins_moe.experts.batched_experts", lambda *given: called.append(given) or given[0])
    layer = Experts(4, DIM, HIDDEN, F.silu, gated=True)
    rows, counts = torch.randn(10, DIM), torch.tensor([4, 3, 2, 1])
    layer.compute(rows, counts)
    assert not called
    layer.bfloat16().compute(rows.bfloat16(), counts)
    assert len(called) == 1
    assert not in_batches(rows.bfloat16().to("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True):  # as in a plan
        assert not in_batches(torch.empty(10, DIM, dtype=torch.bfloat16))


def test_a_compiled_layer_is_batched_too():
    called = []

    def backend(graph, _):
        called.extend(node.target for node in graph.graph.nodes if "batched_experts" in str(node.target))
        return graph.forward

    layer = Experts(4, DIM, HIDDEN, F.silu, gated=True).bfloat16()
    torch.compile(layer.compute, fullgraph=True, backend=backend)(
        torch.randn(10, DIM).bfloat16(), torch.tensor([4, 3, 2, 1])
    )
    assert len(called) == 1


def test_selective_checkpointing_does_not_multiply_again(counting):
    assert MoE.recompute_plan(None)["forge_moe.batched_experts"] == "keep"
    counts = [33, 0, 1, 64]
    rows, gradient = rows_and_gradient(counts)
    weights = stacks(len(counts), "silu")
    inputs = [rows, *weights.values()]
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.forge_moe.batched_experts.default])

    with counting() as counted:
        output = checkpoint(
            functools.partial(batched, **weights), rows, counts, "silu", use_reentrant=False, context_fn=context
        )
        found = torch.autograd.grad(output, inputs, gradient)

    assert counted.computed["forge_moe.batched_experts"] == 1
    assert counted.computed["forge_moe.batched_experts_backward"] == 1
    expected = torch.autograd.grad(batched(rows, counts, "silu", **weights), inputs, gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_an_expert_with_few_rows_is_not_given_as_many_as_one_with_many():
    """A skewed load does not cost what padding does."""
    layout = _Layout.of(torch.tensor([2000, 10, 20, 30, 1000, 40, 64, 50]))

    assert [(batch.n_experts, batch.n_rows) for batch in layout.batches] == [
        (1, 2016),
        (1, 32),
        (2, 32),
        (1, 1024),
        (1, 64),
        (2, 64),
    ]
    assert layout.n_rows == 2016 + 3 * 32 + 1024 + 3 * 64


def test_experts_with_about_as_many_rows_are_one_batch():
    layout = _Layout.of(torch.tensor([64, 40, 90, 33, 64, 50, 70, 96]))

    assert [(batch.n_experts, batch.n_rows) for batch in layout.batches] == [(8, 96)]


def test_a_row_that_is_not_finite_reaches_no_other_expert():
    counts = [3, 5, 40]
    rows, gradient = rows_and_gradient(counts)
    weights = stacks(len(counts), "silu")
    expected = torch.autograd.grad(batched(rows, counts, "silu", **weights), list(weights.values()), gradient)
    with torch.no_grad():
        rows[0] = torch.nan

    output = batched(rows, counts, "silu", **weights)

    assert output[0].isnan().all()
    assert output[1:].isfinite().all()
    for one, other in zip(torch.autograd.grad(output, list(weights.values()), gradient), expected, strict=True):
        assert one[0].isnan().any()
        torch.testing.assert_close(one[1:], other[1:], rtol=0, atol=0)


def test_torch_works_out_shapes_without_multiplying():
    """As torch.compile must, whatever the counts. (All but the comparison of outputs, as parts of what is kept are
    memory that nobody has written to.)"""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    rows, _ = rows_and_gradient([33, 0, 1, 64])
    for activation in FUNCTIONS:
        weights = stacks(4, activation)
        given = (rows, torch.tensor([33, 0, 1, 64]), weights.get("gate"), weights["up"], weights["down"], activation)
        torch.library.opcheck(torch.ops.forge_moe.batched_experts.default, given, test_utils=checks)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
def test_compiled_experts_are_those_that_are_not(activation):
    counts = [33, 0, 1, 64]
    rows, gradient = rows_and_gradient(counts)
    weights = stacks(len(counts), activation)
    inputs = [rows, *weights.values()]
    function = torch.compile(batched_experts, fullgraph=True, backend="aot_eager")

    found = function(rows, torch.tensor(counts), weights.get("gate"), weights["up"], weights["down"], activation)
    expected = batched(rows, counts, activation, **weights)

    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for one, other in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
