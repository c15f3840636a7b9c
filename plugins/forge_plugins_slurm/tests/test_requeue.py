"""When a run puts its job back into the queue. Slurm itself is asked in ``test_preemption.py``."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from forge_plugins_slurm.config import SlurmRequeueConfig
from forge_plugins_slurm.requeue import SlurmRequeue


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def end(tmp_path, monkeypatch):
    """Ends a run; returns what was asked of a stand-in for scontrol, what was said, and if the script is asked."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)

    def run(reason: str, *, shows: str = "JobState=RUNNING Reason=None", answer: str = "", code: int = 0):
        (tools / "scontrol").write_text(
            f'#!/bin/sh\nif [ "$1" = show ]; then echo "JobId=$3 {shows}"; exit; fi\n'
            f'echo "$@" >>{calls}\necho "{answer}" >&2\nexit {code}\n'
        )
        (tools / "scontrol").chmod(0o755)
        if shows == "no scontrol":
            (tools / "scontrol").unlink()
        said: list[str] = []
        context = SimpleNamespace(rank=0, run_dir=tmp_path, log=said.append)
        SlurmRequeue(SlurmRequeueConfig()).run_end(context, 5, reason)
        asked = calls.read_text().splitlines() if calls.exists() else []
        return asked, "\n".join(said), (tmp_path / "slurm/requeue").exists()

    return run


@pytest.mark.parametrize("reason", ["SIGUSR1", "SIGTERM", "the time limit"])
def test_a_run_that_the_cluster_has_stopped_requeues_its_job(end, reason):
    assert end(reason) == (["requeue 7"], "job 7 is requeued and will go on from here", True)


def test_a_task_of_an_array_is_requeued_by_the_array_s_id(end, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")

    assert end("SIGUSR1")[0] == ["requeue 5_2"]


@pytest.mark.parametrize("reason", ["SIGINT", "enough"])
def test_a_run_that_somebody_wanted_to_end_is_not_requeued(end, reason):
    asked, said, script = end(reason)

    assert (asked, script) == ([], False)
    assert "not requeued" in said


def test_a_run_that_has_reached_its_end_is_not_requeued(end):
    assert end("") == ([], "", False)


def test_outside_of_slurm_nothing_is_asked(end, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")

    assert end("SIGTERM") == ([], "", False)


def test_a_cancelled_job_stays_cancelled(end):
    asked, said, script = end("SIGTERM", shows="JobState=COMPLETING Reason=None")

    assert (asked, script) == ([], False)
    assert "COMPLETING" in said


def test_a_job_at_its_time_limit_is_requeued(end):
    assert end("SIGTERM", shows="JobState=COMPLETING Reason=TimeLimit")[0] == ["requeue 7"]


def test_slurm_having_requeued_the_job_already_is_success(end):
    _, said, _ = end("SIGUSR1", answer="Job is pending execution for job 7", code=1)

    assert "is requeued" in said


def test_what_the_run_cannot_do_is_left_to_the_script(end):
    asked, said, script = end("SIGUSR1", answer="Unable to contact slurm controller", code=1)
    assert (len(asked), script) == (3, True)
    assert "Unable to contact slurm controller); the batch script will try" in said

    asked, said, script = end("SIGUSR1", shows="no scontrol")
    assert (len(asked), script) == (3, True)
    assert "there is no scontrol); the batch script will try" in said
