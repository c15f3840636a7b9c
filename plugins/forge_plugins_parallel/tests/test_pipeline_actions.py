"""A schedule of one's own: what it says, and what is refused before anything runs; runs are in tests/parity."""

import typing
from types import SimpleNamespace

import attrs
import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from forge_core.config.sections import ParallelSection
from forge_core.errors import ConfigError
from forge_plugins_parallel.config import FullyShardConfig, PipelineConfig, ScheduleName
from forge_plugins_parallel.pipeline import stages_of_rank
from forge_plugins_parallel.pipeline_actions import parse_actions
from forge_plugins_parallel.pipeline_cut import cut_blocks
from forge_testing.small_model import small_job

REVERSED = ("1F0 1B0 1F1 1B1", "0F0 0F1 0B0 0B1")
V_OF_THREE = ("0F0 0F1 2F0 2I0 2W0 2F1 2B1 0B0 0B1", "1F0 1F1 1I0 1B1 1W0")


@pytest.mark.parametrize("name", sorted({*typing.get_args(ScheduleName)} - {"GPipe", "1F1B", "DualPipeV"}))
def test_the_schedules_of_torch_are_some(name):
    """But for those without rows, and the one that overlaps actions."""
    config = PipelineConfig(schedule=name)
    of_rank = {"num_stages": 4, "group_size": 2, "group_rank": 0, "is_first": False, "is_last": False, "submod": None}
    stages = [SimpleNamespace(stage_index=stage, **of_rank) for stage in stages_of_rank(config, 2, 0)]
    made = get_schedule_class(name)(stages, 8, loss_fn=lambda output, target: output)

    rows = tuple(" ".join(str(one) for one in row if one is not None) for row in made.pipeline_order.values())
    actions = parse_actions(rows)

    assert actions.rank_of == config.rank_of(2)
    assert actions.n_microbatches == 8
    assert actions.splits_backward is config.splits_backward


def test_ranks_hold_the_stages_that_they_have_actions_of():
    config = PipelineConfig(schedule="custom", actions=V_OF_THREE)

    assert [stages_of_rank(config, 2, rank) for rank in (0, 1)] == [[0, 2], [1]]
    assert config.splits_backward
    assert not PipelineConfig(schedule="custom", actions=REVERSED).splits_backward


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            ["0F0 0B0", "1F0 1X0 1B0"],
            "rank 1: '1X0' is no action; one is a stage, F, B, I or W, and a",
        ),
        (["0F0 0B0", " "], "rank 1 has no actions"),
        (["0F0 0B0 1F1", "1F0 1B0"], "stage 1 is on rank 0 and on rank 1"),
        (["0F0 0B0", "2F0 2B0"], "has the stages 0, 2, and they count from 0 without a gap"),
        (["0B0 0F0", "1F0 1B0"], "0B0 comes; a stage has each microbatch as F and B, or as F, I and W"),
        (["0F0 0F0 0B0", "1F0 1B0"], "0F0 comes after 0F0; a stage"),
        (["0F0 0B0 0W0", "1F0 1B0"], "0W0 comes after 0F0, 0B0; a stage"),
        (["0F0 0F1 0B1", "1F0 1B0 1F1 1B1"], "there is no 0B0, of 2 microbatches"),
        (["0F0 0I0", "1F0 1B0"], "there is no 0W0, of 1 microbatches"),
        (["0F0 0B0", "1F0 1B0 1F1 1B1"], "there is no 0F1, of 2 microbatches"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "rank 0 waits for ever before 0B0: 1B0 comes too late"),
        (["0F0 0B0 1F0 1B0"], "rank 0 waits for ever before 0B0: 1B0 comes too late"),
    ],
)
def test_what_is_no_schedule_is_refused(rows, sentence):
    with pytest.raises(ValueError, match=r".+") as refused:
        PipelineConfig(schedule="custom", actions=tuple(rows))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"schedule": "custom"}, 'must be given with schedule = "custom": a row for each rank along pp, as "0F0'),
        ({"schedule": "1F1B", "actions": REVERSED}, 'go with schedule = "custom", and the schedule is "1F1B"; leave'),
        ({"schedule": "custom", "actions": REVERSED, "stages_per_rank": 2}, "actions say which rank has which stages"),
    ],
)
def test_actions_and_the_name_of_a_schedule_go_together(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        PipelineConfig(**keys)


def test_more_stages_than_layers_are_refused_by_what_names_them():
    with pytest.raises(ConfigError, match=r"of 4 stages needs at least one; .* name fewer stages in actions, or"):
        cut_blocks(dict.fromkeys("abc", 1.0), 4)


def problems(actions=REVERSED, microbatches=2, pp=2, **fsdp):
    job = small_job()
    passes = {"fsdp": SimpleNamespace(config=FullyShardConfig(**fsdp))} if fsdp else {}
    parallel = ParallelSection(pp=pp, passes=passes)
    job = attrs.evolve(job, train=attrs.evolve(job.train, grad_accumulation=microbatches), parallel=parallel)
    return list(PipelineConfig(schedule="custom", actions=actions).check(job))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"pp": 4}, "has rows for 2 ranks, and parallel.pp = 4"),
        ({"microbatches": 4}, "has 2 microbatches, and a step train.grad_accumulation = 4; make them equal"),
        ({"actions": V_OF_THREE, "reshard_after_forward": "always"}, "with I and W cannot be combined with reshard"),
    ],
)
def test_a_schedule_that_does_not_fit_the_job_is_refused(keys, sentence):
    assert problems() == problems(microbatches=None) == []
    (said,) = problems(**keys)
    assert said[0] == "actions"
    assert sentence in said[1]
