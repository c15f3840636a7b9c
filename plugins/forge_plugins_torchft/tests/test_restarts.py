"""Which replicas are started again, and from where."""

import os
import signal
import subprocess
from types import SimpleNamespace

import attrs
import pytest

from forge_core.job import dump_job, load_job
from forge_core.registry.discovery import discover
from forge_plugins_torchft.config import EXPECTED
from forge_plugins_torchft.replicas import _job_of_replica, _look_after, _Replica, _resuming


def test_it_resumes_from_another_replica_also_where_the_job_begins_with_loaded_weights(job):
    """``checkpoint.load`` beside a checkpoint to resume from is refused, and the replica was not started again."""
    start = [f"run.dir={job.folder}/runs", "run.name=base", "callbacks=[]", "train.steps=1"]
    assert job.run("run", *start)[0] == 0
    load = f"checkpoint.load.path={job.folder}/runs/base"
    both = load_job(job.config, [load], catalog=discover())
    first, second = (_job_of_replica(both, number) for number in (0, 1))
    assert _resuming(first) == first
    code, said = job.run("run", f"run.dir={first.run.dir}", "run.name=replica_0", "callbacks=[]", "train.steps=2", load)
    assert code == 0, said

    assert _resuming(first) == first
    again = job.folder / "again.toml"
    again.write_text(dump_job(_resuming(second)))

    resumed = load_job(again, catalog=discover())
    assert resumed.checkpoint.resume == str(first.run.dir / "replica_0")
    assert attrs.evolve(resumed, checkpoint=second.checkpoint) == second


@pytest.mark.parametrize(("at_first", "again"), [("1", "1"), ("2", "2"), ("3", "2")])
def test_one_that_comes_back_waits_for_another_before_it_begins(job, monkeypatch, at_first, again):
    """Where all had died, it went on alone from a checkpoint of its own that was older than theirs."""
    told = []

    def popen(command, *, env, **_):
        told.append(env[EXPECTED])
        return SimpleNamespace(stdout=(), stderr=())

    monkeypatch.setattr(subprocess, "Popen", popen)
    one = _Replica(load_job(job.config, catalog=discover()), 0, job.folder / "0.toml", [], {EXPECTED: at_first})
    one.start()
    one.restarts = 1
    one.start()

    assert told == [at_first, again]


def test_one_that_ends_as_invalid_is_named_and_not_started_again(job):
    code, said = job.run("replicas", "--replicas", "1", "data.pattern=*.nothing")

    assert code == 2, said
    assert "[replica 0] exit code 2; it is not started again" in said


def test_a_replica_that_is_being_started_as_a_signal_comes_is_told_too(tmp_path):
    """It trained on by itself, without the others, and the command did not end."""

    class Slow(_Replica):
        def start(self):
            if self.number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            self.process = subprocess.Popen(["sleep", "5"])

    group = [Slow(SimpleNamespace(), number, tmp_path / "job.toml", [], {}) for number in range(3)]
    _look_after(group, 10, lambda: None)

    assert [one.code for one in group] == [-signal.SIGTERM] * 3
