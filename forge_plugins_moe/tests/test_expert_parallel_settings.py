"""What of expert parallelism is refused before a run, and with which sentence; as ``forge plan`` finds it out too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_moe.config import HierarchicalConfig
from forge_plugins_moe.hierarchical import HierarchicalDispatcher
from forge_plugins_moe.nodes import NodeGroups, Nodes

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 1
n_heads = 4
[model.feed_forward]
name = "moe"
n_experts = 16
hidden_dim = 16
[data]
name = "text_files"
path = "not-there"
[train]
steps = 10
seq_len = 16
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[parallel]
ep = 8
"""
KEY = "parallel.passes.expert_parallel"
HIERARCHICAL = f'{KEY}.dispatcher={{name="hierarchical", ranks_per_node=6}}'


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            [f"{KEY}.overlap=true"],
            "overlap: the layers have no shared experts that could be computed while rows travel",
        ),
        ([f"{KEY}.chunks=2"], "has no effect without overlap = true"),
        ([f"{KEY}.chunks=0", f"{KEY}.overlap=true"], "chunks"),
        ([HIERARCHICAL], "with 6 ranks a node, the 8 ranks of parallel.ep are not shared out evenly to 2 nodes"),
        ([f'{KEY}.dispatcher={{name="hierarchical", ranks_per_node=0}}'], "ranks_per_node"),
        ([f"{KEY}.dispatcher=hierarchic"], "hierarchical"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(tmp_path, capfd, settings, sentence):
    config = tmp_path / "job.toml"
    config.write_text(JOB)

    code = main(["plan", str(config), "--world-size", "8", *settings])

    assert code == 2
    assert sentence in " ".join(capfd.readouterr().err.split())


@pytest.fixture
def ranks():
    """A group of 16 of which this is rank 5, and the mesh of ``ep`` (8) in it."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
    yield init_device_mesh("cpu", (2, 8), mesh_dim_names=("expert_dp", "ep"))["ep"]
    dist.destroy_process_group()


def test_nodes_are_those_of_all_ranks_whichever_ranks_share_experts(ranks):
    everywhere_second = init_device_mesh("cpu", (8, 2), mesh_dim_names=("ep", "tp"))["ep"]

    assert _numbers(Nodes.of(ranks, 4, "k")) == (2, 4)
    assert _numbers(Nodes.of(ranks, 8, "k")) == _numbers(Nodes.of(ranks, 16, "k")) == (1, 8)
    assert _numbers(Nodes.of(everywhere_second, 4, "k")) == (4, 2)


def test_ranks_are_grouped_by_node_and_by_place_once_for_all_layers(ranks):
    nodes = Nodes.of(ranks, 4, "k")
    groups, again = (NodeGroups.of(ranks, nodes) for _ in range(2))

    assert dist.get_process_group_ranks(groups.within) == [4, 5, 6, 7]
    assert dist.get_process_group_ranks(groups.between) == [1, 5]
    assert (groups.within, groups.between) == (again.within, again.between)
    alone = NodeGroups.of(ranks, Nodes.of(ranks, 1, "k"))
    assert (alone.within, alone.between) == (None, ranks.get_group())


def test_the_launcher_says_how_many_ranks_a_node_has(ranks, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _numbers(HierarchicalDispatcher(HierarchicalConfig(), n_experts=16, mesh=ranks).nodes) == (4, 2)

    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ConfigError, match=r"dispatcher\.ranks_per_node: the launcher does not say by LOCAL_WORLD_SIZE"):
        HierarchicalDispatcher(HierarchicalConfig(), n_experts=16, mesh=ranks)


def _numbers(nodes):
    return nodes.count, nodes.ranks_each


def test_a_number_of_ranks_beyond_counting_is_left_to_the_mesh():
    job: Any = SimpleNamespace(parallel=SimpleNamespace(tp=1, ep=10**18))

    assert [*HierarchicalConfig(ranks_per_node=6).check(job)] == []
