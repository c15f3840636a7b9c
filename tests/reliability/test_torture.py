"""Goal G27: a run under random faults needs nobody, loses nothing it acknowledged, and gets on."""

import os
import random
import signal
import statistics
import subprocess
import time
from collections import Counter

import pytest

from faults.damage import flip_bit
from faults.history import problems_of
from faults.job import SmallJob
from forge_core.checkpoint.store import CheckpointStore

SECONDS = float(os.environ.get("FORGE_TORTURE_SECONDS", "600"))
BETWEEN_FAULTS = 60.0
GOODPUT = 0.8
INTERVAL = 150
"""Steps of 20 ms between saves that cost 0.14 s each (two ranks, their loaders and the saving share two cores): at a
fault a minute, of which some damage the newest, about this costs least."""
SUPERVISED = ("--max-restarts", "3")
"""Forge itself starts again what dies; only a launcher that has been killed needs somebody to."""


@pytest.fixture
def small_disk(tmp_path):
    """32 MiB, or an ordinary folder where nothing may be mounted; says which."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(place)], capture_output=True)
    yield place, mounted.returncode == 0
    if mounted.returncode == 0:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.torture
@pytest.mark.timeout(SECONDS + 1800)
def test_a_run_under_random_faults_gets_on_by_itself_and_its_history_is_one(small_disk):
    place, is_small = small_disk
    job = SmallJob(place / "job", steps=10_000_000, interval=INTERVAL)
    chosen, faults, damaged = random.Random(27), Counter(), set()
    menu = ["kill a rank", "kill all", "stop and kill a rank", "flip a bit and kill all"]
    menu += ["fill the disk"] if is_small else []

    job.start(*SUPERVISED)
    assert job.wait_for(1), job.output[-3000:]
    began, first = time.monotonic(), job.step()
    due = began + chosen.expovariate(1 / BETWEEN_FAULTS)
    while time.monotonic() < began + SECONDS:
        if job.code is not None:  # whatever the reason: this is all that a cluster does
            job.collect()
            job.start(*SUPERVISED)
        if time.monotonic() > due and len(job.ranks()) == 2:
            fault = chosen.choice(menu)
            faults[fault] += 1
            _do(fault, job, place, chosen, damaged)
            job.collect()  # before the next start forgets what it will do again
            due = time.monotonic() + chosen.expovariate(1 / BETWEEN_FAULTS)
        time.sleep(0.1)
    if job.code is None:
        job.kill_all()
    seconds = time.monotonic() - began

    a_step = statistics.median(line["step_seconds"] for line in job.metrics() if "step_seconds" in line)
    goodput = (job.step() - first) * a_step / seconds
    print(f"{seconds:.0f} s, {dict(faults)}, {job.step()} steps of {a_step * 1e3:.1f} ms, goodput {goodput:.1%}")
    assert list(problems_of(job.events(), job.metrics(), job.losses, damaged)) == []
    assert goodput >= GOODPUT


def _do(fault, job, place, chosen, damaged):
    rank = chosen.choice(job.ranks())
    if fault == "kill a rank":
        job.send(rank, signal.SIGKILL)
    elif fault == "stop and kill a rank":
        job.send(rank, signal.SIGSTOP)
        time.sleep(3)
        job.send(rank, signal.SIGKILL)
    elif fault == "kill all":
        job.kill_all()
    elif fault == "flip a bit and kill all":
        job.kill_all()
        store = CheckpointStore(job.run / "checkpoints")
        if len(steps := store.steps()) > 1:  # with a single one, it could not but end
            file = chosen.choice(sorted(path for path in store.folder(steps[-1]).rglob("*") if path.is_file()))
            flip_bit(file, chosen.randrange(file.stat().st_size * 8))
            damaged.add(steps[-1])
    else:
        failures = _failures(job)
        filler = place / "filler"
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            except OSError:
                pass
        deadline = time.monotonic() + 15
        while _failures(job) == failures and job.code is None and time.monotonic() < deadline:
            time.sleep(0.1)
        filler.unlink()


def _failures(job):
    return sum(event["event"] == "save_failed" for event in job.events())
