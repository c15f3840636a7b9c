"""What cannot be is said before a run starts. That what can be is right is for the parity matrix to say."""

from __future__ import annotations

import pytest
from torch import nn

from forge_core.job import ConfigProblems, load_job
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover
from forge_plugins_moe.expert_parallel import stacks_of

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4

[model.feed_forward]
name = "moe"
n_experts = 6
hidden_dim = 24

[data]
name = "text_files"
path = "."

[train]
steps = 2
seq_len = 16
batch_size = 1

[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return discover()


@pytest.mark.parametrize(
    ("overrides", "ranks", "sentences"),
    [
        (
            ["parallel.ep=4"],
            4,
            ["model.feed_forward.n_experts", "6 experts cannot be shared out evenly to parallel.ep = 4"],
        ),
        (
            ["parallel.ep=2"],
            10,
            ["model.feed_forward: ", "a stack of 6 × 24 × 32, of which parallel.ep = 2", "evenly to the 5 that have"],
        ),
        (["parallel.ep=4"], 2, ["parallel.ep = 4 must divide the 2 ranks that it borrows"]),
        (["parallel.ep=2", "parallel.tp=2"], 2, ["parallel.ep = 2 must divide the 1 ranks that it borrows"]),
        (
            ["parallel.tp=5"],
            5,
            ["model.feed_forward.hidden_dim", "24 features cannot be shared out evenly to parallel.tp"],
        ),
        (
            ["parallel.ep=2", "parallel.passes.compile.fullgraph=true"],
            2,
            ["the sizes of what ranks exchange depend on data"],
        ),
        (
            ["model.feed_forward.router.top_k=7"],
            1,
            ["model.feed_forward.router.top_k", "7 experts a token are more than the 6"],
        ),
        (["model.feed_forward.capacity_factor=0"], 1, ["model.feed_forward.capacity_factor", "greater than 0"]),
        (["model.feed_forward.drop=position"], 1, ["model.feed_forward.drop", "has no effect without capacity_factor"]),
        (["model.feed_forward.shared_gate=true"], 1, ["has no effect without shared_experts"]),
        (["model.feed_forward.layers=[0,5]"], 1, ["has 5, and the model's layers are 0 to 1"]),
        (["model.feed_forward.first_dense=2"], 1, ["leaves none of the 2 layers sparse"]),
        (["model.feed_forward.router.name=softmx_topk"], 1, ["softmx_topk", "softmax_topk"]),
        (
            ["model.feed_forward.router.n_groups=4", "model.feed_forward.router.groups_per_token=1"],
            1,
            ["6 experts cannot be put into 4 equal groups"],
        ),
    ],
)
def test_what_cannot_be_is_said_at_validation(tmp_path, catalog, overrides, ranks, sentences):
    file = tmp_path / "job.toml"
    file.write_text(JOB)

    with pytest.raises(ConfigProblems) as caught:
        load_job(file, overrides, catalog=catalog, world_size=ranks)

    for sentence in sentences:
        assert sentence in str(caught.value)


@pytest.mark.parametrize("ranks", [2, 6, 16])  # of 16, FSDP shares a stack along its width or dim
def test_the_sparse_job_itself_is_valid(tmp_path, catalog, ranks):
    file = tmp_path / "job.toml"
    file.write_text(JOB)

    job = load_job(file, ["parallel.ep=2"], catalog=catalog, world_size=ranks)

    assert {"fsdp", "expert_parallel"} <= set(job.parallel.passes)


def test_stacks_are_found_by_patterns_too():
    class Planned(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleDict({str(i): nn.ModuleDict({"experts": nn.Linear(2, 2)}) for i in range(2)})

        def parallel_plan(self):
            return {"blocks.*.experts": "expert", "blocks.*": "whole"}

    assert stacks_of(Planned()) == ["blocks.0.experts", "blocks.1.experts"]
