"""``metrics.grad_norm_per``: the norm of the gradient along axes of the mesh."""

import pytest

from forge_core.config.problems import ConfigProblems
from forge_core.job import load_job
from forge_core.registry.discovery import discover

PIPED = ["parallel.pp=2", "train.batch_size=2", "train.grad_accumulation=2", "train.steps=3"]


def test_squares_of_pipeline_ranks_add_up_to_that_of_the_norm(tiny):
    lines = tiny.completed("--nproc", "2", *PIPED, 'metrics.grad_norm_per=["pp"]')

    for line in lines:
        parts = [line["grad_norm/pp0"], line["grad_norm/pp1"]]
        assert min(parts) > 0
        assert sum(part**2 for part in parts) == pytest.approx(line["grad_norm"] ** 2, rel=1e-6)


@pytest.mark.parametrize(
    ("axes", "world_size", "sentence"),
    [
        ('["tp"]', 2, "metrics.grad_norm_per[0]: there is one rank along tp"),
        ('["dp_shard"]', 1, "metrics.grad_norm_per[0]: there is one rank along dp_shard"),
        ('["tp"]', None, "metrics.grad_norm_per[0]: there is one rank along tp"),
        ('["dp_shard", "dp_shard"]', 2, "metrics.grad_norm_per[1]: dp_shard is named twice"),
        ('["dp_shards"]', 2, "did you mean 'dp_shard'?"),
        ('["dp_replicate"]', 2, '"dp_replicate" is not allowed'),
    ],
)
def test_axes_that_would_tell_nothing_are_refused(tiny, axes, world_size, sentence):
    with pytest.raises(ConfigProblems) as refused:
        load_job(tiny.config, [f"metrics.grad_norm_per={axes}"], catalog=discover(), world_size=world_size)

    assert sentence in str(refused.value)


def test_an_axis_whose_degree_is_not_known_yet_is_taken(tiny):
    job = load_job(tiny.config, ['metrics.grad_norm_per=["dp_shard"]'], catalog=discover(), world_size=None)

    assert job.metrics.grad_norm_per == ("dp_shard",)


def test_updates_are_made_of_clipped_gradients(shared_tiny):
    """Clipped to far below Adam's epsilon, a gradient moves nothing."""
    free = shared_tiny.completed("run.name=free", "train.clip_norm=0")
    clipped = shared_tiny.completed("run.name=clipped", "train.clip_norm=1e-12", "optimizer.weight_decay=0")

    assert free[-1]["loss"] < free[0]["loss"] - 0.5
    assert abs(clipped[-1]["loss"] - clipped[0]["loss"]) < 0.1
