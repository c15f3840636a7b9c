"""Replicas train the model that one process would, and go on without those that are killed."""

import shutil
import signal
import socket
import time

import pytest
import torch

from forge_plugins_torchft.config import EXPECTED, HOST, LIGHTHOUSE, TorchftConfig
from forge_plugins_torchft.lighthouse import lighthouse

BOTH = ["--replicas", "2"]
STATE = "plugin.forge-plugins-torchft.callback.torchft"

pytestmark = pytest.mark.slow


def training(lines):
    return [(line["step"], line["loss"], line["grad_norm"], line["tokens"]) for line in lines]


def nearly(expected):
    return [pytest.approx(line, rel=1e-5) for line in expected]


def manager_state(job, replica):
    state, _ = job.saved(replica)
    return state["callbacks"][STATE]["state"]


def have_same_bits(job):
    """Whether the newest checkpoints of both replicas hold the same model, optimizer and position."""
    (state, tensors), (other_state, other_tensors) = job.saved(0), job.saved(1)
    return (
        (state["step"], state["position"]) == (other_state["step"], other_state["position"])
        and tensors.keys() == other_tensors.keys()
        and all(torch.equal(tensors[key], other_tensors[key]) for key in tensors)
    )


def losses_of_sources(lines):
    return [{name: value for name, value in line.items() if name.startswith("loss/")} for line in lines]


def test_two_replicas_train_as_one_process_does_and_resume(job):
    single = ["train.batch_size=8", "callbacks=[]", "run.name=single"]
    both = [f'{{name="text_files", path="{job.folder}/text", pattern="{files}.txt"}}' for files in ("[0-5]", "[6-9]")]
    sources = [f'{{name="{name}", weight=1.0, source={one}}}' for name, one in zip("ab", both, strict=True)]
    mixed = f'data={{name="mixture", sources=[{", ".join(sources)}]}}'
    code, said = job.run("run", *single, "train.steps=8", mixed)
    assert code == 0, said
    reference = training(job.lines(job.folder / "runs" / "single", "metrics.jsonl"))
    of_sources = losses_of_sources(job.lines(job.folder / "runs" / "single", "metrics.jsonl"))
    assert of_sources[0].keys() == {"loss/a", "loss/b"}

    code, said = job.run("replicas", *BOTH, "train.steps=5", mixed)
    assert code == 0, said
    assert training(job.metrics(0)) == training(job.metrics(1)) == nearly(reference[:5])
    assert losses_of_sources(job.metrics(1)) == [pytest.approx(losses, rel=1e-5) for losses in of_sources[:5]]
    assert have_same_bits(job)
    assert manager_state(job, 0) == manager_state(job, 1) == {"step": 5, "batches_committed": 10}

    shutil.rmtree(job.directory(1))  # a machine was lost; another one takes up the checkpoint of the first
    code, said = job.run("replicas", *BOTH, "train.steps=8", mixed)
    assert code == 0, said
    assert training(job.metrics(0)) == nearly(reference)
    assert training(job.metrics(1)) == nearly(reference[5:])
    assert have_same_bits(job)
    assert manager_state(job, 0) == manager_state(job, 1) == {"step": 8, "batches_committed": 16}


@pytest.mark.nightly
def test_state_that_is_not_of_its_parameters_shape_is_had_from_another_replica(job):
    """While both run, and each rank of a replica has its part of it."""
    optimizer = (
        'optimizer={name="grouped", groups=[{roles=["matrix"], optimizer={name="adafactor", lr=1e-2, beta1=0.5}}, '
        '{optimizer={name="adamw_8bit", lr=1e-2, min_elements=0}}]}'
    )
    directory = [f"run.dir={job.folder}/runs/both", "run.name=replica_0"]
    code, said = job.run("run", *directory, optimizer, "callbacks=[]", "train.steps=4")
    assert code == 0, said

    settings = ["--nproc", "2", "train.batch_size=2", optimizer, "train.steps=7"]
    with lighthouse(None, TorchftConfig(), 1.0) as url:
        both = [job.start_replica(url, number, *settings, **{EXPECTED: "2"}) for number in (0, 1)]
        outputs = [job.output(one) for one in both]

    assert [one.returncode for one in both] == [0, 0], outputs
    assert [(event["from_step"], event["step"]) for event in job.events(1, "taken_over")] == [(0, 4)], outputs
    assert training(job.metrics(1)) == training(job.metrics(0))[4:]
    assert have_same_bits(job)  # losses are sums over replicas, and would be equal all the same
    slots = {key.rpartition(".")[2] for key in job.saved(1)[1] if key.startswith("optimizer.")}
    assert {"row", "column", "momentum_scale", "square_scale"} <= slots


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [[], ["--nproc", "2", "train.batch_size=2"]], ids=["whole", "sharded"])
def test_a_replica_that_is_killed_costs_no_step_and_no_sample_and_comes_back(job, layout):
    run = job.start("replicas", *BOTH, "--heartbeat-timeout", "3", *layout, "train.steps=1000000")
    job.wait_until(lambda: len(job.metrics(1)) > 20, run)
    job.kill(1)
    job.wait_until(lambda: len(job.events(1, "started")) == 2 and len(job.metrics(1)) > 20, run)
    run.send_signal(signal.SIGTERM)  # everyone saves
    said = job.output(run)

    assert run.returncode == 3, said
    assert ("exit code 5; started again" if layout else "ended by SIGKILL; started again") in said
    lines = job.metrics(0)
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    # a step has as many samples as its replicas need, following those before, also if it was tried twice
    count_from = {one["step"] + 1: one["count"] for one in job.events(0, "replicas")}
    count, tokens = 0, 0
    for line in lines:
        count = count_from.get(line["step"], count)
        tokens += count * 4 * 32
        assert line["tokens"] == tokens
    alone = [one["step"] + 1 for one in job.events(0, "replicas") if one["count"] == 1]
    back = job.events(1, "taken_over")[-1]["step"] + 1
    assert all(1 < step < back for step in alone)  # none if it is back while the other one still waits for it
    stopped = min(len(lines), job.metrics(1)[-1]["step"])  # one may have been a step ahead of the other
    assert training(job.metrics(1))[: stopped - back + 1] == training(lines)[back - 1 : stopped]

    step = max(job.saved(replica)[0]["step"] for replica in (0, 1))
    code, said = job.run("replicas", *BOTH, *layout, f"train.steps={step + 5}")
    assert code == 0, said
    assert have_same_bits(job)


@pytest.mark.nightly
def test_when_all_are_killed_before_the_first_is_back_they_begin_at_the_newest_checkpoint(job):
    """The first one back began alone at its own, and overtook what the other one had done since."""
    run = job.start("replicas", *BOTH, "--heartbeat-timeout", "1", "train.steps=1000000", "checkpoint.interval=5")
    job.wait_until(lambda: len(job.metrics(1)) > 20, run)
    job.kill(0)
    job.wait_until(lambda: len(job.events(1, "saved")) > 2, run)  # alone: it is the first that saves
    job.kill(1)
    newest = job.events(1, "saved")[-1]["step"]
    job.wait_until(lambda: job.events(1, "resumed") and job.metrics(1)[-1]["step"] > newest + 20, run)
    run.send_signal(signal.SIGTERM)
    said = job.output(run)

    assert [event["step"] for event in job.events(0, "taken_over")] == [newest], said
    assert not job.events(1, "taken_over")


@pytest.mark.nightly
def test_a_replica_with_another_job_is_refused_and_the_others_go_on(job):
    with lighthouse(None, TorchftConfig(), 1.0) as url:
        first = job.start_replica(url, 0, "train.steps=100000")
        job.wait_until(lambda: len(job.metrics(0)) > 5, first)
        other = job.start_replica(url, 1, "train.steps=100000", "optimizer.lr=2e-2")
        said = job.output(other)
        before = len(job.metrics(0))
        job.wait_until(lambda: len(job.metrics(0)) > before + 20, first)

        assert other.returncode == 2, said
        assert "another job, mesh or packages than number 1 of the 2" in said
        assert job.events(0, "replicas")[-1]["count"] == 1


@pytest.mark.parametrize(
    "layout",
    [[], pytest.param(["--nproc", "2", "train.batch_size=2"], marks=pytest.mark.nightly)],
    ids=["whole", "sharded"],
)
def test_a_replica_that_waits_for_another_is_told_to_stop_and_saves(job, layout):
    """It stopped only after ``join_timeout``, and without its last steps."""
    settings = [*layout, "callbacks.0.min_replicas=2", "train.steps=100000", "checkpoint.interval=100000"]
    with lighthouse(None, TorchftConfig(min_replicas=2), 1.0) as url:
        waiting, lost = [job.start_replica(url, number, *settings) for number in (0, 1)]
        job.wait_until(lambda: len(job.metrics(0)) > 5, waiting)
        job.kill(1)
        lost.wait(timeout=60)
        before = -1
        while before != len(job.metrics(0)):
            before = len(job.metrics(0))
            time.sleep(3)
        job.tell(0, signal.SIGTERM)
        said = job.output(waiting)

        assert waiting.returncode == 3, said
        assert job.saved(0)[0]["step"] == job.metrics(0)[-1]["step"] == before
        assert [event["step"] for event in job.events(0, "saved")] == [before]

        again = job.start_replica(url, 0, *settings)  # nothing is trained, and nothing saved
        job.wait_until(lambda: len(job.events(0, "resumed")) == 1, again)
        job.tell(0, signal.SIGTERM)
        said = job.output(again)
        assert again.returncode == 3, said
        assert [event["step"] for event in job.events(0, "saved")] == [before]


@pytest.mark.nightly
def test_a_replica_that_waits_for_others_notices_that_the_lighthouse_is_gone(job):
    with lighthouse(None, TorchftConfig(min_replicas=2), 1.0) as url:
        alone = job.start("run", "callbacks.0.min_replicas=2", **{LIGHTHOUSE: url, HOST: "127.0.0.1"})
        job.wait_until(lambda: (job.folder / "runs" / "both" / "events.jsonl").exists(), alone)
    said = job.output(alone)

    assert alone.returncode == 5, said
    assert f"no lighthouse answers at {url}" in said


def test_a_lighthouse_that_goes_while_a_replica_joins_is_named(job):
    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    alone = job.start("run", "callbacks.0.timeout=3", **{LIGHTHOUSE: url, HOST: "127.0.0.1"})
    server.accept()[0].close()  # the replica, which looks whether it may begin
    server.close()
    said = job.output(alone)

    assert alone.returncode == 5, said
    assert f"no lighthouse answers at {url}" in said
