"""Goal G5: a run whose processes were all killed, again and again, ends with the very same numbers."""

import random

import pytest
import torch

import fork_server
from faults.history import problems_of
from faults.job import SmallJob
from forge_core.checkpoint.store import open_checkpoint

STEPS_A_KILL = 24
"""More than two kills may be apart, so that each attempt gets further than the one before it."""


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.nightly)]
)
@pytest.mark.timeout(3600)
def test_a_run_that_was_killed_as_a_whole_ends_bit_for_bit_as_one_that_was_not(tmp_path, kills):
    steps = STEPS_A_KILL * kills
    straight = SmallJob(tmp_path / "straight", steps=steps, interval=5, popen=fork_server.Popen)
    straight.start()
    assert straight.wait() == 0, straight.output[-3000:]
    killed = SmallJob(tmp_path / "killed", steps=steps, interval=5, popen=fork_server.Popen)
    chosen = random.Random(kills)

    for kill in range(kills):
        killed.start()
        # past what was done before, so that every attempt gets on, and at a moment that nothing is aligned to
        assert killed.wait_for(1 + (steps - 20) * kill // kills + chosen.randrange(15)), killed.output[-3000:]
        killed.kill_all()
    killed.start()
    assert killed.wait() == 0, killed.output[-3000:]

    assert len([event for event in killed.events() if event["event"] == "resumed"]) >= kills - 1
    assert list(problems_of(killed.events(), killed.metrics(), killed.losses)) == []
    assert _training(killed) == _training(straight)
    assert len(_training(killed)) == steps
    _assert_same(straight, killed, steps)


def _training(job):
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    return [tuple(line[key] for key in keys) for line in job.metrics() if "loss" in line]


def _assert_same(one, other, step):
    first, second = _tensors(one, step), _tensors(other, step)
    assert first.keys() == second.keys()
    assert any(key.startswith("optimizer.") for key in first)
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def _tensors(job, step):
    checkpoint = open_checkpoint(job.run / "checkpoints" / f"step_{step:08d}")
    tensors = {key: torch.empty(e.size, dtype=e.properties.dtype) for key, e in checkpoint.saved_tensors().items()}
    checkpoint.load(tensors)
    return tensors
