"""What ``forge plan`` says that experts' ranks send each other is what they send."""

import json
import math
import re

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.cli import main
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.dispatch import Assignments
from forge_plugins_moe.visits import MeanVisits, expected_visits, visits
from forge_plugins_plan.simulation import simulate
from forge_testing.component_case import builder
from forge_testing.several_ranks import on_ranks

DIM, EXPERTS, NODES, TOKENS = 64, 256, 8, 512
ROUTERS = {
    "any of all": {"name": "softmax_topk", "top_k": 8, "balance": 0.0},
    "of 4 of 8 groups": {"name": "sigmoid_topk", "top_k": 8, "n_groups": 8, "groups_per_token": 4},
}
DISPATCHERS = {"hierarchical": {"ranks_per_node": 1}, "all_to_all": {}}

JOB = """
[model]
name = "transformer"
dim = 64
n_layers = 3
n_heads = 4
[model.feed_forward]
name = "moe"
n_experts = 256
hidden_dim = 16
first_dense = 1
[data]
name = "text_files"
path = "not-there"
[train]
steps = 10
seq_len = 64
batch_size = 2
grad_accumulation = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""
TOKENS_PLANNED = 2 * 2 * 2 * 64
"""Of two layers and two microbatches."""


@attrs.frozen
class Sent:
    nodes: float
    """That a token visits on average, counted one by one."""
    between: float
    """Bytes a token that left this rank, in forward and backward."""


class EightNodesOfOneRank:
    """256 experts on 8 nodes; what is sent is counted where it leaves."""

    def report(self):
        mesh = init_device_mesh("cpu", (NODES,), mesh_dim_names=("ep",))
        return {
            (router, dispatcher): self.send(ROUTERS[router], {"name": dispatcher, **DISPATCHERS[dispatcher]}, mesh)
            for router in ROUTERS
            for dispatcher in DISPATCHERS
        }

    def send(self, router_table, dispatcher_table, mesh):
        build = builder()
        router = build(build.resolve("router", router_table), dim=DIM, n_experts=EXPERTS)
        router.init_weights(SeededInitializer(7), "", 0.02)
        hidden = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
        routing = router(hidden)
        given = Assignments(routing.token, routing.expert, routing.weight, routing.top_k)
        experts = routing.expert.view(TOKENS, -1) // (EXPERTS // NODES)
        nodes = sum(len(set(row)) for row in experts.tolist()) / TOKENS

        dispatcher = build(build.resolve("dispatcher", dispatcher_table), n_experts=EXPERTS, mesh=mesh)
        with counted_bytes() as count:
            dispatched = dispatcher.dispatch(hidden.requires_grad_(), given)
            dispatcher.combine(dispatched.rows * 2, dispatched).square().sum().backward()
        return nodes, count.bytes / TOKENS  # no class of this file: ranks know it by another name


class counted_bytes(TorchDispatchMode):
    """Counts what leaves this rank in exchanges, without the numbers of rows, which are always as many."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default and list(args[2]) != [1] * NODES:
            rows, _, sent, _ = args
            others = sum(sent) - sent[dist.get_rank()]
            self.bytes += others * math.prod(rows.shape[1:]) * rows.element_size()
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def sent():
    """By router and dispatcher, the mean over ranks."""
    reports = on_ranks(EightNodesOfOneRank, "report", NODES)
    return {
        key: Sent(*(sum(values) / NODES for values in zip(*(one[key] for one in reports), strict=True)))
        for key in reports[0]
    }


@pytest.fixture
def planned(tmp_path):
    """The traffic of a simulated rank."""
    config = tmp_path / "job.toml"
    config.write_text(JOB)
    catalog = discover()

    def plan(router, dispatcher, world_size=NODES, ranks_per_node=1):
        settings = [*chosen(router, dispatcher), f"parallel.ep={world_size}"]
        job = load_job(config, settings, catalog=catalog, world_size=world_size)
        rank = simulate(job, catalog, 257, world_size, stage=0, ranks_per_node=ranks_per_node)
        assert rank.reason == ""
        (traffic,) = rank.traffic
        return traffic

    return plan


def chosen(router, dispatcher):
    return [
        f"model.feed_forward.router={toml(ROUTERS[router])}",
        f"parallel.passes.expert_parallel.dispatcher={toml({'name': dispatcher})}",
    ]


def toml(table):
    return "{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in table.items()) + "}"


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("router", ROUTERS)
def test_256_experts_on_eight_nodes_send_what_is_planned(sent, planned, router, dispatcher):
    traffic = planned(router, dispatcher)

    assert traffic.within_node == 0
    assert traffic.between_nodes / TOKENS_PLANNED == pytest.approx(sent[router, dispatcher].between, rel=0.02)
    assert _planned_nodes(traffic) == pytest.approx(sent[router, dispatcher].nodes, abs=0.05)


@pytest.mark.slow
def test_tokens_visit_fewer_nodes_where_groups_are_nodes(sent):
    assert sent["any of all", "hierarchical"].nodes == pytest.approx(5.29, abs=0.05)
    assert sent["of 4 of 8 groups", "hierarchical"].nodes <= 4
    assert sent["any of all", "hierarchical"].between < 0.85 * sent["any of all", "all_to_all"].between


def test_a_plan_knows_how_many_nodes_a_token_visits(planned):
    assert _planned_nodes(planned("any of all", "hierarchical", 8)) == pytest.approx(5.29, abs=0.05)
    assert _planned_nodes(planned("any of all", "hierarchical", 32)) == pytest.approx(7.27, abs=0.05)
    assert 3 < _planned_nodes(planned("of 4 of 8 groups", "hierarchical", 64, 8)) <= 4


def test_a_plan_tells_links_apart(planned):
    hierarchical, flat = (planned("any of all", name, 64, 8) for name in DISPATCHERS)

    row = 4 * DIM * 4  # fp32, there and back, and its gradients
    assert flat.within_node / TOKENS_PLANNED == pytest.approx(8 * row * 7 / 64, rel=1e-6)
    assert flat.between_nodes / TOKENS_PLANNED == pytest.approx(8 * row * 56 / 64, rel=1e-6)
    ids = 24 * 8
    assert hierarchical.between_nodes / TOKENS_PLANNED == pytest.approx((5.29 * row + ids) * 7 / 8, rel=0.01)
    ranks = expected_visits(EXPERTS, 8, 64)
    assert hierarchical.within_node / TOKENS_PLANNED == pytest.approx((ranks * row + ids) * 7 / 8, rel=0.01)


def test_the_text_of_a_plan_tells_what_is_sent_over_which_link(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("forge_plugins_plan.report.alternatives", lambda *job: iter(()))  # each is one more simulation
    config = tmp_path / "job.toml"
    config.write_text(JOB)
    settings = [*chosen("any of all", "hierarchical"), "parallel.ep=64"]

    code = main(["plan", str(config), "--world-size", "64", "--ranks-per-node", "16", *settings])

    out, said = capfd.readouterr()
    assert code == 0, said
    assert re.search(r"Sent by rank 0 in a step, MiB; 16 ranks a node +within +between\n", out)
    assert re.search(r"  blocks\.\*\.feed_forward\.experts \(2\) +[\d.]+ +[\d.]+\n", out)
    assert re.search(
        r"a token goes to 8 experts on 7\.\d+ of 64 ranks, on 3\.\d+ of 4 nodes; forward and backward", out
    )


@pytest.mark.parametrize(("nodes", "expected"), [(8, 5.29), (32, 7.27), (1, 1.0)])
def test_expected_visits_of_uniform_choices(nodes, expected):
    assert expected_visits(256, 8, nodes) == pytest.approx(expected, abs=0.005)
    assert expected_visits(8, 8, 4) == 4


def test_visits_are_counted_once_a_place_and_not_for_none():
    token = torch.tensor([0, 0, 1, 1, 2, 2])
    expert = torch.tensor([0, 1, 1, 3, 4, 4])  # 4 is none
    given = Assignments(token, expert, torch.ones(6), 2, some_to_none=True)

    assert visits(given, 3, 4, 2).tolist() == [[True, True, False], [False, True, False]]
    assert MeanVisits.of(given, 3, 4, 4, 2) == MeanVisits(4 / 3, 4 / 3, 1.0, 4, 2)


def _planned_nodes(traffic):
    return float(traffic.reason.partition("ranks, on ")[2].partition(" of ")[0])
