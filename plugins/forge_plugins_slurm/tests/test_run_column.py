"""What ``forge runs`` says of Slurm jobs: their numbers, why they wait, where they run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_plugins_slurm.job_record import JobRecord, record_job


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Sets what a stand-in for squeue prints."""
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin/squeue"

    def say(text: str) -> None:
        squeue.write_text(f"#!/bin/sh\nprintf '{text}'\n")
        squeue.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    return say


def make_run(folder: Path, name: str, *, job: str = "", has_begun: bool = True) -> Path:
    """One that was preempted in step 7."""
    run = folder / name
    (run / "slurm").mkdir(parents=True)
    if job:
        (run / "slurm/job.toml").write_text("[train]\nsteps = 40\n")
        record_job(run, JobRecord(job_id=job, submitted=0.0, log=""))
    if has_begun:
        (run / "job.toml").write_text("[train]\nsteps = 40\n")
        (run / "log.txt").write_text("a line\n")
        (run / "events.jsonl").write_text(json.dumps({"event": "preempted", "step": 7}) + "\n")
    return run


def rows(capsys) -> dict[str, dict]:
    assert main(["runs", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_the_queue_is_believed_before_the_files_of_a_run(folder, queue, capsys):
    make_run(folder, "a-running", job="4_1")
    make_run(folder, "b-requeued", job="5")
    make_run(folder, "c-gone", job="6")
    make_run(folder, "d-submitted", job="7", has_begun=False)
    make_run(folder, "e-by-hand")
    (folder / "f-no-run/slurm").mkdir(parents=True)
    queue("4_1|RUNNING|n[1-2]\\n5|PENDING|(BeginTime)\\n7|PENDING|(Priority)\\n")

    found = rows(capsys)

    assert {name: (row["state"], row["columns"].get("job", {}).get("text")) for name, row in found.items()} == {
        "a-running": ("running", "4_1 n[1-2]"),
        "b-requeued": ("queued", "5 (BeginTime)"),
        "c-gone": ("stopped", "6"),
        "d-submitted": ("queued", "7 (Priority)"),
        "e-by-hand": ("stopped", None),
    }
    assert found["d-submitted"]["steps"] == 40
    assert found["a-running"]["columns"]["job"]["job_id"] == "4_1"


def test_a_run_that_was_submitted_and_left_the_queue_without_a_start_is_prepared(folder, queue, capsys):
    make_run(folder, "demo", job="7", has_begun=False)
    queue("")

    assert rows(capsys)["demo"]["state"] == "prepared"


def test_a_job_that_waits_is_explained(folder, queue, capsys):
    make_run(folder, "demo", job="7")
    queue("7|PENDING|(Priority)\\n")

    assert main(["explain", "runs/demo"]) == 0

    assert capsys.readouterr().out.startswith("runs/demo has not ended: its job waits in the queue, at step 7 of 40.")


def test_the_name_of_a_cluster_before_its_jobs_is_no_job(folder, queue, capsys):
    """squeue prints it where SLURM_CLUSTERS is set."""
    make_run(folder, "demo", job="7")
    queue("CLUSTER: big\\n7|PENDING|(Priority)\\n\\nCLUSTER: small\\n")

    assert rows(capsys)["demo"]["state"] == "queued"


def test_without_slurm_it_says_that_the_queue_is_not_known(folder, capsys):
    make_run(folder, "demo", job="7")

    assert main(["runs", "--json"]) == 0

    assert "Slurm does not answer" in capsys.readouterr().err
