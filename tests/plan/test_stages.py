"""Ranks of a pipeline that follow from another one's simulation do what they do when they are simulated themselves."""

from __future__ import annotations

import attrs
import pytest

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_plan.simulation import Simulation, simulate
from forge_plugins_plan.stages import simulate_stages

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 8
n_heads = 4
max_seq_len = 64
vocab_size = 300
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "bf16"
[optimizer]
name = "adamw"
lr = 1e-3
"""
FULL = "parallel.passes.activation_checkpointing.mode=full"
SELECTIVE = "parallel.passes.activation_checkpointing.mode=selective"
ALWAYS = "parallel.passes.fsdp.reshard_after_forward=always"
SPARSE = (
    "model.feed_forward.name=moe",
    "model.feed_forward.n_experts=8",
    "model.feed_forward.router.name=sigmoid_topk",
)
MUON = (
    'optimizer={name="grouped", groups=[{roles=["matrix"], optimizer={name="muon", lr=1e-3}}, '
    '{optimizer={name="adamw", lr=1e-3}}]}'
)
BY_NAME = (
    'optimizer={name="grouped", groups=[{patterns=["blocks.2.*"], optimizer={name="sgd", lr=1e-3}}, '
    '{optimizer={name="adamw", lr=1e-3}}]}'
)


@pytest.fixture(scope="module")
def catalog():
    return discover()


@pytest.fixture(scope="module")
def job_of(catalog, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")

    def load(world_size, schedule, microbatches, *settings):
        file = folder / "job.toml"
        file.write_text(JOB)
        pipeline = [f"train.grad_accumulation={microbatches}", f"parallel.passes.pipeline.schedule={schedule}"]
        return load_job(file, ["parallel.pp=4", *pipeline, *settings], catalog=catalog, world_size=world_size)

    return load


@pytest.fixture
def followed(monkeypatch):
    """The stages that have followed from another one."""
    stages = []
    follow = Simulation.follow

    def noted(self, patterns):
        found = follow(self, patterns)
        if found is not None:
            stages.append(self.stage)
        return found

    monkeypatch.setattr(Simulation, "follow", noted)
    return stages


def compare_with_whole_simulations(job, catalog, world_size):
    for rank in simulate_stages(job, catalog, 300, world_size, None, 8, timed=True):
        whole = simulate(job, catalog, 300, world_size, rank.stage, shorten=False, timed=True)

        assert rank.reason == ""
        assert rank.rank == whole.rank
        assert rank.memory == whole.memory
        assert rank.parameter_bytes == whole.parameter_bytes
        assert rank.traffic == whole.traffic
        assert rank.optimizer.parameters == whole.optimizer.parameters
        assert rank.optimizer.changes == whole.optimizer.changes
        if not rank.found:  # no blocks are left out
            assert list(rank.run) == list(whole.run)


@pytest.mark.parametrize(
    ("world_size", "schedule", "microbatches", "settings", "expected"),
    [
        (8, "1F1B", 6, ["parallel.tp=2", "model.n_layers=4"], [2]),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                (10, "1F1B", 12, ["model.n_layers=17", "parallel.pp=5"], [3]),
                (10, "GPipe", 10, ["model.n_layers=12", "parallel.pp=5", "model.multi_token={depths=2}"], [2, 3]),
                (8, "1F1B", 5, [], [2]),
                (8, "1F1B", 9, [FULL], [2]),
                (4, "1F1B", 12, ["train.precision=fp32"], [2]),
                (8, "1F1B", 9, ["parallel.ep=2", *SPARSE], [2]),
                (8, "1F1B", 9, ["parallel.cp=2"], [2]),
                (16, "1F1B", 9, ["parallel.dp_replicate=2", SELECTIVE], [2]),
                (8, "1F1B", 9, ["model.tie_embeddings=true"], [2]),
                (8, "1F1B", 9, ["parallel.passes.lora.rank=4"], [2]),
                (8, "1F1B", 9, [MUON], [2]),
                (8, "GPipe", 12, [], [2]),
                (8, "GPipe", 12, [ALWAYS], [2]),
                (8, "Interleaved1F1B", 16, [], []),
            ]
        ),
    ],
)
def test_ranks_whose_stages_are_alike_follow_from_one(
    catalog, job_of, followed, world_size, schedule, microbatches, settings, expected
):
    job = job_of(world_size, schedule, microbatches, *settings)

    compare_with_whole_simulations(job, catalog, world_size)

    assert followed == expected


@pytest.mark.parametrize(
    ("world_size", "microbatches", "settings"),
    [
        pytest.param(8, 6, [*SPARSE, "model.feed_forward.first_dense=2"], id="other blocks"),
        pytest.param(8, 6, ["model.n_layers=5"], id="more blocks"),
        pytest.param(8, 6, ["model.layers=[{at=2, window=8}]"], id="a window"),
        pytest.param(8, 6, [BY_NAME], id="another optimizer"),
        pytest.param(12, 6, [], id="ranks that are not in one node"),
        pytest.param(8, 6, [ALWAYS], id="what depends on the order of forwards and backwards"),
        pytest.param(8, 4, [], id="few microbatches"),
    ],
)
def test_others_are_simulated_themselves(catalog, job_of, followed, world_size, microbatches, settings):
    job = job_of(world_size, "1F1B", microbatches, "model.n_layers=4", *settings)

    ranks = simulate_stages(job, catalog, 300, world_size, None, 8, timed=True)

    assert [rank.memory is not None for rank in ranks] == [True] * 4
    assert not followed


@pytest.fixture(scope="module")
def alike(catalog, job_of):
    """A stage before its step, what it does in it, and a stage that does the same."""
    job = job_of(8, "1F1B", 6, "model.n_layers=4")
    one, other = (Simulation(job, catalog, 300, 8, stage, None, 8, True) for stage in (1, 2))
    return one.twin(), one.run(0), other


@pytest.mark.parametrize(
    ("action", "changed"),
    [
        (("forward_one_chunk", 1), {"after": "backward_one_chunk"}),
        (("backward_one_chunk", 5), {"after": "forward_one_chunk"}),
        (("backward_one_chunk", 2), {"freed": [None] * 3}),
    ],
)
def test_a_rank_whose_schedule_does_otherwise_does_not_follow(alike, action, changed):
    twin, known, other = alike
    assert other.follow([(twin, known)]) is not None

    by_action = {**known.traces.by_action}
    by_action[0, *action] = attrs.evolve(by_action[0, *action], **changed)
    known = attrs.evolve(known, traces=attrs.evolve(known.traces, by_action=by_action))

    assert other.follow([(twin, known)]) is None
