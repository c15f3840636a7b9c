"""Goal G2: a power cut at any moment loses nothing that was acknowledged."""

import json
import os
import random
import time
import tomllib

import pytest

from faults.job import SmallJob
from faults.power import NotPermittedError, power_disk
from faults.saving import announced, judge
from faults.zygote import end
from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
CUTS = 200


@pytest.fixture
def disk(tmp_path):
    try:
        with power_disk(tmp_path) as made:
            yield made
    except NotPermittedError as error:
        pytest.skip(str(error))


def cuts(zygote, disk, scratch, number, *, background, saver="sound"):
    """What is wrong after each power cut, while two ranks save without a pause."""
    store = disk.path / "checkpoints"
    ranks = zygote.start(
        2,
        "faults.saving:save_again_and_again",
        scratch,
        store=str(store),
        background=background,
        values=250_000,
        steps=1_000_000,
        saver=saver,
    )
    chosen = random.Random(number)
    try:
        for _ in range(number):
            time.sleep(chosen.random() * max(0.1, announced(scratch).seconds))
            acknowledged = announced(scratch).saved
            disk.cut()
            begun = announced(scratch).begun
            with disk.after_the_cut() as after:
                yield acknowledged, judge(after / "checkpoints", acknowledged=acknowledged, begun=begun).problems
            assert all(rank.is_running for rank in ranks), (scratch / "rank0.log").read_text()
    finally:
        for rank in ranks:
            rank.send(9)
        end(ranks)


@pytest.mark.parametrize("background", [False, True])
def test_a_power_cut_leaves_what_was_acknowledged(zygote, disk, tmp_path, background):
    outcomes = list(cuts(zygote, disk, tmp_path, CUTS // 2, background=background))

    bad = [problems for _, problems in outcomes if problems]
    print(f"{len(outcomes)} cuts, {len(bad)} bad, {len({step for step, _ in outcomes})} steps")
    assert bad == []
    assert len(outcomes) == CUTS // 2
    assert len({step for step, _ in outcomes}) > CUTS // 8, "hardly anything was saved between cuts"


@pytest.mark.parametrize("saver", ["no file flush", "no folder flush"])
def test_power_cuts_find_out_a_saver_with(zygote, disk, tmp_path, saver):
    outcomes = cuts(zygote, disk, tmp_path, CUTS, background=False, saver=saver)

    assert any(problems for _, problems in outcomes)
    outcomes.close()


CUTS_OF_A_RUN = 25


def test_a_power_cut_leaves_the_history_of_a_run_up_to_what_was_saved(disk):
    """Its loss curve, its events, and what it was started with; and the same command goes on from there."""
    job = SmallJob(disk.path / "job", steps=100_000, interval=3)
    os.sync()  # what is trained on has been there for long
    job.start("--nproc", "1", "--resume", "never")
    chosen = random.Random(0)
    try:
        assert job.wait_for(4), job.output[-3000:]
        for cut in range(CUTS_OF_A_RUN):
            time.sleep(chosen.random() / 2)
            acknowledged = max([event["step"] for event in job.events() if event["event"] == "saved"], default=0)
            disk.cut()
            with disk.after_the_cut() as after:
                run = after / "job/runs/small"
                newest = max(CheckpointStore(run / "checkpoints").steps(), default=0)
                assert newest >= acknowledged
                assert _history(run)[:newest] == [*range(1, newest + 1)]
                assert tomllib.loads((run / "job.toml").read_text())["checkpoint"]["resume"] == "never"
                assert json.loads((run / "environment.json").read_text())["mesh"]["pp"] == 1
                assert json.loads((run / "events.jsonl").read_text().splitlines()[0])["event"] == "started"
                if cut == CUTS_OF_A_RUN - 1:
                    job.kill_all()  # a process that still runs on this machine would hold the lease
                    again = ["run", str(after / "job/small.toml"), f"run.dir={after}/job/runs"]
                    assert main([*again, f"train.steps={newest + 6}"]) == 0
                    assert _history(run) == [*range(1, newest + 7)]
    finally:
        job.kill_all()


def _history(run):
    """The steps of the loss curve; of a last line, a power cut may leave a part."""
    lines = (run / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
    return [line["step"] for line in map(json.loads, lines) if "loss" in line]
