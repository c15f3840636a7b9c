"""Runs in fp16: a loss scale that is too large costs steps, and nothing else."""

import json

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint

SETTINGS = ["train.precision=fp16", "scheduler.decay_steps=10", "metrics.interval=1", "eval.interval=0"]


@pytest.fixture(scope="module")
def first_scale():
    """So large that the first steps overflow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forge_core.train.scales._FIRST", 2.0**20)
        yield 2.0**20


@pytest.fixture(scope="module")
def straight(shared_tiny, first_scale):
    return [line for line in shared_tiny.completed(*SETTINGS, "run.name=fp16", "train.steps=10") if "loss" in line]


def test_the_terminal_has_the_loss_scale_beside_a_norm_that_overflowed(shared_tiny, straight):
    log = (shared_tiny.path("fp16") / "log.txt").read_text()

    (first,) = [line for line in log.splitlines() if "step 1/10 " in line]
    assert "grad_norm inf" in first
    assert "loss_scale 524,288" in first


def checkpoint(tiny, name):
    return open_checkpoint(tiny.path(name) / "checkpoints/step_00000010")


def test_steps_that_overflow_have_no_update_and_are_no_anomalies(shared_tiny, straight, first_scale):
    overflows = straight[-1]["overflows"]
    good = straight[overflows:]

    assert 2 <= overflows <= 6
    assert [line["overflows"] for line in straight] == [*range(1, overflows), *[overflows] * (11 - overflows)]
    assert [line["loss_scale"] for line in straight][:2] == [first_scale / 2, first_scale / 4], "that of the next step"
    assert {line["loss_scale"] for line in good} == {first_scale / 2**overflows}
    assert all(line["grad_norm"] < 10 for line in good)
    assert {line["skipped"] for line in straight} == {0}
    events = (shared_tiny.path("fp16") / "events.jsonl").read_text().splitlines()
    assert "skipped" not in {json.loads(event)["event"] for event in events}


def test_its_losses_are_those_of_fp32_once_it_fits(shared_tiny, straight):
    first, *_ = shared_tiny.completed(*SETTINGS, "train.precision=fp32", "run.name=fp32", "train.steps=3")

    assert straight[0]["loss"] == pytest.approx(first["loss"], rel=1e-3)
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.1


def test_it_goes_on_with_the_loss_scale_that_it_had(shared_tiny, straight, training_values):
    shared_tiny.completed(*SETTINGS, "run.name=fp16-halved", "train.steps=3")
    resumed = shared_tiny.completed(*SETTINGS, "run.name=fp16-halved", "train.steps=10")

    assert training_values(resumed) == training_values(straight)
    whole, halved = checkpoint(shared_tiny, "fp16"), checkpoint(shared_tiny, "fp16-halved")
    assert halved.state()["anomalies"] == whole.state()["anomalies"]
    assert halved.state()["anomalies"]["loss_scale"][0] == straight[-1]["loss_scale"]
    assert [key for key in whole.saved_tensors() if not torch.equal(whole.read(key), halved.read(key))] == []
