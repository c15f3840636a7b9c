"""Overlap: what is computed while rows travel, in forward and in backward, and what is refused."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from forge_core.distributed.mesh import join_process_group
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe import exchange
from forge_testing.component_case import builder

DIM = 16


@pytest.fixture
def mesh():
    join_process_group(torch.device("cpu"))
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


@pytest.fixture
def events(monkeypatch):
    """When exchanges of rows begin and end, in the order in which it happens."""
    happened = []
    begin, end = exchange._Exchange.begin.__func__, exchange._Exchange.end

    def noted_begin(cls, rows, *sizes):
        if rows.ndim == 2 and rows.is_floating_point():
            happened.append("begin")
        return begin(cls, rows, *sizes)

    def noted_end(self):
        if self.rows.ndim == 2 and self.rows.is_floating_point():
            happened.append("end")
        return end(self)

    monkeypatch.setattr(exchange._Exchange, "begin", classmethod(noted_begin))
    monkeypatch.setattr(exchange._Exchange, "end", noted_end)
    return happened


def layer(mesh, dispatcher="all_to_all", router="softmax_topk", **keys):
    build = builder()
    table = {"name": "moe", "n_experts": 4, "hidden_dim": 8, "shared_experts": 1, "router": {"name": router}, **keys}
    moe = build(build.resolve("feed_forward", table), dim=DIM, layer=0, n_layers=1)
    moe.init_weights(SeededInitializer(0), "", 0.1, 0.1)
    options = {"ranks_per_node": 1} if dispatcher == "hierarchical" else {}
    use = build.resolve("dispatcher", {"name": dispatcher, **options})
    moe.experts.dispatcher = build(use, n_experts=4, mesh=mesh)
    return moe


def hidden():
    return torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()


def noting(happened, what):
    def note(*_):
        happened.append(what)

    return note


def test_shared_experts_are_computed_while_rows_travel_in_forward_and_backward(mesh, events):
    moe = layer(mesh)
    moe.experts.chunks = 1
    moe.shared.down.register_forward_hook(noting(events, "shared"))
    moe.shared.up.register_full_backward_hook(noting(events, "shared"))

    output = moe(hidden())
    assert events == ["begin", "shared", "end", "begin", "end"]
    events.clear()
    output.sum().backward()

    assert events == ["begin", "end", "begin", "shared", "end"]


def test_without_overlap_nothing_is_computed_while_rows_travel(mesh, events):
    moe = layer(mesh)
    moe.shared.down.register_forward_hook(noting(events, "shared"))

    moe(hidden())

    assert events == ["begin", "end", "begin", "end", "shared"]


def test_a_chunk_travels_while_experts_work_on_the_one_before(mesh, events, monkeypatch):
    moe = layer(mesh)
    moe.experts.chunks = 2
    compute = moe.experts.compute

    def noted(rows, counts):
        events.append("experts")
        return compute(rows, counts)

    monkeypatch.setattr(moe.experts, "compute", noted)

    moe(hidden())

    assert events == ["begin", "begin", "end", "experts", "begin", "end", "experts", "begin", "end", "end"]


@pytest.mark.parametrize("router", ["softmax_topk", "expert_choice"])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "hierarchical"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 20])
def test_any_number_of_chunks_gives_the_same(mesh, chunks, dispatcher, router):
    plain, cut = layer(mesh, dispatcher, router), layer(mesh, dispatcher, router)
    cut.experts.chunks = chunks
    facts = {name: torch.arange(2)[:, None].expand(2, 7) * 7 for name in plain.needs}
    inputs = [hidden(), hidden()]
    valid = torch.arange(14).view(2, 7) % 5 != 0

    outputs = [moe(one, valid, **facts) for moe, one in zip((plain, cut), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()

    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(one.grad for one in inputs))
    for (name, one), (_, other) in zip(plain.named_parameters(), cut.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


class Exchanges(TorchDispatchMode):
    """Counts what is begun."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops._c10d_functional.all_to_all_single.default
        return func(*args, **(kwargs or {}))


def test_what_selective_recomputation_keeps_is_not_exchanged_again(mesh):
    keeping = partial(create_selective_checkpoint_contexts, [torch.ops._c10d_functional.all_to_all_single.default])
    counts, outputs, gradients = [], [], []
    for run in (
        lambda moe, tokens: moe(tokens),
        partial(checkpoint, use_reentrant=False, context_fn=keeping),
        partial(checkpoint, use_reentrant=False, context_fn=noop_context_fn),
    ):
        tokens = hidden()
        with Exchanges() as exchanges:
            outputs.append(run(layer(mesh), tokens))
            outputs[-1].square().sum().backward()
        counts.append(exchanges.count)
        gradients.append(tokens.grad)

    plain, kept, repeated = counts
    assert plain == kept < repeated
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("router", ["softmax_topk", "expert_choice"])
def test_in_each_chunk_experts_that_have_equally_many_rows_have_equally_many(mesh, monkeypatch, router):
    """So that all ranks have something to do: assignments of expert choice are those of the first expert first."""
    moe = layer(mesh, router=router)
    moe.experts.chunks = 4
    moe.router.gate.weight.data.zero_()  # where all are alike, the first ones are chosen
    seen = []
    monkeypatch.setattr(moe.experts, "compute", lambda rows, counts: seen.append(counts.tolist()) or rows)
    facts = {name: torch.zeros(2, 8, dtype=torch.int64) for name in moe.needs}

    moe(torch.ones(2, 8, DIM), **facts)

    whole = [sum(counts) for counts in zip(*seen, strict=True)]
    assert seen == [[count // 4 for count in whole]] * 4
