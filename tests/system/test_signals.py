"""What any rank is asked to do, all do at the same step, whatever each of them is doing then."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import fork_server
from forge_core.checkpoint.store import CheckpointStore

RANKS = 2


@pytest.fixture
def ranks(tiny, tmp_path):
    """Start both ranks of these runs; whatever is left of them is killed at the end."""
    started, stores = [], []

    def start(runs):
        plan = tmp_path / "plan.json"
        # not on rank 0, so that no port is chosen before somebody listens on it
        stores.extend(TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in runs)
        plan.write_text(json.dumps([{**run, "port": store.port} for run, store in zip(runs, stores, strict=True)]))
        script = Path(__file__).with_name("signalled_rank.py")
        for rank in range(RANKS):
            group = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost"}
            started.append(
                fork_server.Popen(
                    [sys.executable, script, tiny.config, plan],
                    env={**tiny.environment(), **group, "TORCHELASTIC_USE_AGENT_STORE": "True"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield start
    for rank in started:
        rank.kill()
        rank.communicate()


def endings(ranks, timeout=240):
    """Of each rank, ``[exit code, step, reason]`` of each run."""
    said = [rank.communicate(timeout=timeout) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, said
    return [[json.loads(line) for line in out.splitlines() if line.startswith("[")] for out, _ in said]


def events(tiny, name):
    return [json.loads(line) for line in (tiny.path(name) / "events.jsonl").read_text().splitlines()]


ENDLESS = ["train.steps=1000000", "train.batch_size=1", "checkpoint.interval=0"]


def stop_at_different_times(tiny, ranks, runs):
    """Short steps, and signals up to 30 ms apart, of which the first is for either rank."""
    chance = random.Random(0)
    names = [f"run-{i}" for i in range(runs)]
    started = ranks([{"overrides": [*ENDLESS, f"run.name={name}"]} for name in names])
    for name in names:
        steps_done(tiny, name, 3, started)
        order = chance.sample(range(RANKS), RANKS)
        os.kill(started[order[0]].pid, signal.SIGUSR1)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(started[order[1]].pid, signal.SIGTERM)

    first, second = endings(started, timeout=600)

    assert len(first) == runs
    assert first == second
    for name, (code, step, reason) in zip(names, first, strict=True):
        assert (code, reason in ("SIGUSR1", "SIGTERM")) == (3, True)
        assert CheckpointStore(tiny.path(name) / "checkpoints").steps() == [step]
        assert (events(tiny, name)[-1]["event"], events(tiny, name)[-1]["step"]) == ("preempted", step)


def last_words(started):
    for rank in started:
        rank.kill()
    return [rank.communicate() for rank in started]


def steps_done(tiny, name, steps, started):
    end = time.monotonic() + 120
    while not (tiny.path(name) / "metrics.jsonl").exists() or len(tiny.metrics(name)) < steps:
        assert [rank.poll() for rank in started] == [None] * RANKS, last_words(started)
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.nightly
@pytest.mark.slow
def test_signals_at_different_times_stop_all_ranks_at_the_same_step(tiny, ranks):
    stop_at_different_times(tiny, ranks, runs=5)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_signals_at_different_times_stop_all_ranks_at_the_same_step_fifty_times(tiny, ranks):
    stop_at_different_times(tiny, ranks, runs=50)


SETTINGS = {
    "step": [],
    "evaluation": ["eval.interval=4", "data.validation=0.3"],
    "writing": ["checkpoint.interval=4"],
    "data": [],
    "compiling": ["parallel.passes.compile=true"],
}


def stop_in(tiny, ranks, cases, timeout=240):
    """Each moment on the rank that is told; returns the last step of each run."""
    runs = [
        {"overrides": [*ENDLESS, *SETTINGS[moment], f"run.name={moment}-{rank}"], "moment": moment, "rank": rank}
        for moment, rank in cases
    ]

    first, second = endings(ranks(runs), timeout)

    assert len(first) == len(cases)
    assert first == second
    for (moment, rank), (code, step, reason) in zip(cases, first, strict=True):
        name = f"{moment}-{rank}"
        assert (code, reason) == (3, "SIGUSR1")
        assert events(tiny, name)[-1].items() >= {"event": "preempted", "step": step, "reason": "SIGUSR1"}.items()
        assert CheckpointStore(tiny.path(name) / "checkpoints").newest(print).step == step
    return dict(zip(cases, [step for _, step, _ in first], strict=True))


TOLD = [("step", 1), ("evaluation", 0), ("writing", 1), ("data", 0)]
THE_OTHERS = [("step", 0), ("evaluation", 1), ("writing", 0), ("data", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [TOLD, pytest.param([*TOLD, *THE_OTHERS], marks=pytest.mark.nightly)], ids=["one", "each"]
)
def test_a_signal_to_one_rank_stops_all_whatever_it_is_doing(tiny, ranks, cases):
    last = stop_in(tiny, ranks, cases)

    assert max(last.values()) <= 4 + 8, last  # the time of a step or two; writing goes on beside training
    assert not [line for line in tiny.metrics("evaluation-0") if "eval/loss" in line]
    said = (tiny.path("evaluation-0") / "log.txt").read_text()
    assert "the evaluation is given up, as the run is to stop; forge eval measures a checkpoint" in said


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_signal_to_one_rank_while_it_compiles_stops_all_after_that_step(tiny, ranks):
    last = stop_in(tiny, ranks, [("compiling", 1)], timeout=800)  # a second one would find it compiled

    assert max(last.values()) <= 3, last
