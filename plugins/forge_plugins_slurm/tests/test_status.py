"""``forge status``: runs as their files and the queue tell of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_plugins_slurm.job_record import JobRecord, record_job

HOUR_AGO = 3600


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


def make_run(
    folder: Path,
    name: str,
    *,
    step: int = 0,
    saved: int = 0,
    events: Sequence[tuple[str, int]] = (),
    job: str = "",
    age: float = HOUR_AGO,
) -> Path:
    run = folder / name
    (run / "slurm").mkdir(parents=True)
    (run / "slurm/job.toml").write_text("[train]\nsteps = 40\n")
    if job:
        record_job(run, JobRecord(job_id=job, submitted=0.0, log=""))
    if step:
        (run / "job.toml").write_text("[train]\nsteps = 40\n")
        lines = [{"step": one, "loss": 10 / one} for one in range(1, step + 1)] + [{"step": step, "eval/loss": 1.0}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "log.txt").write_text("a line\n")
    if events:
        lines = [json.dumps({"time": "2026", "event": event, "step": at, "to_step": 3}) for event, at in events]
        (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    if saved:
        (run / f"checkpoints/step_{saved:08d}").mkdir(parents=True)
        (run / f"checkpoints/step_{saved:08d}/manifest.json").write_text("{}")
        (run / "checkpoints/.step_00000099.partial").mkdir()
    for file in run.rglob("*"):
        os.utime(file, (time.time() - age,) * 2)
    return run


def test_every_state_of_a_run_is_told(folder, queue, capsys):
    make_run(folder, "a-finished", step=40, saved=40, job="3")
    make_run(folder, "b-running", step=7, saved=5, job="4_1")
    make_run(folder, "c-requeued", step=7, saved=7, events=[("preempted", 7)], job="5")
    make_run(folder, "d-stopped", step=9, saved=9, events=[("stopped", 9)])
    make_run(folder, "e-failed", step=9, saved=5, events=[("failed", 9)])
    killed = make_run(folder, "f-killed", step=9, saved=5, job="6")
    (killed / "stacks").mkdir()
    (killed / "stacks/fatal_rank_1.txt").write_text("Fatal Python error: Bus error\n\nThread 0x1:\n")
    make_run(folder, "g-submitted", job="7")
    make_run(folder, "h-here", step=2, age=1)
    (folder / "i-no-run").mkdir()
    queue("4_1|RUNNING|n[1-2]\\n5|PENDING|(BeginTime)\\n7|PENDING|(Priority)\\n")

    assert main(["status", "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["state"], row["reason"]) for row in rows] == [
        ("a-finished", "finished", ""),
        ("b-running", "running", "n[1-2]"),
        ("c-requeued", "queued", "(BeginTime)"),
        ("d-stopped", "stopped", ""),
        ("e-failed", "failed", ""),
        (
            "f-killed",
            "failed",
            "killed by SIGBUS: a file that was being read has become shorter, or a disk has failed",
        ),
        ("g-submitted", "queued", "(Priority)"),
        ("h-here", "running", ""),
    ]
    running = rows[1]
    assert (running["step"], running["steps"], running["checkpoint"], running["job_id"]) == (7, 40, 5, "4_1")
    assert running["loss"] == pytest.approx(10 / 7)
    assert HOUR_AGO <= running["age"] < HOUR_AGO + 600


def test_a_table_is_for_people(folder, capsys):
    make_run(folder, "demo", step=7, saved=5)

    assert main(["status", str(folder / "demo")]) == 0

    shown = capsys.readouterr().out
    assert all(word in shown for word in ("RUN", "demo", "7/40", "1.4286", "5", "1 h ago")), shown


def test_a_narrow_terminal_keeps_the_columns(folder, capsys, monkeypatch):
    make_run(folder, "demo", step=7, saved=5, job="4_1")
    make_run(folder, "another", step=40, saved=40)
    monkeypatch.setenv("COLUMNS", "40")

    assert main(["status"]) == 0

    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 40, shown
    assert [line.split() for line in lines if line.strip()] == [
        ["RUN", "STATE", "STEP"],
        ["another", "finished", "40/40"],
        ["loss", "0.2500", "saved", "40", "1", "h", "ago"],
        ["demo", "failed", "7/40"],
        ["loss", "1.4286", "saved", "5", "1", "h", "ago"],
        ["job", "4_1"],
    ]


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ((), 20),
        ([("resumed", 7), ("saved", 20), ("failed", 23)], 23),
        ([("started", 0), ("failed", 35), ("resumed", 7), ("saved", 12)], 12),
        ([("resumed", 7), ("skipped", 30), ("rolled_back", 30)], 7),
    ],
    ids=["of a checkpoint", "of a failure", "since the last start", "since it went back"],
)
def test_the_step_is_the_last_one_that_any_file_tells_of_not_the_last_logged(folder, capsys, events, step):
    make_run(folder, "demo", step=7, saved=20, events=events)

    main(["status", "--json"])

    assert json.loads(capsys.readouterr().out)[0]["step"] == step


def test_metrics_of_weeks_are_not_read_whole(folder, capsys):
    run = make_run(folder, "long", step=1)
    lines = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 100_001))
    (run / "metrics.jsonl").write_text(lines + '{"step": 100001, "lo')

    main(["status", "--json"])

    assert json.loads(capsys.readouterr().out)[0]["step"] == 100_000


def test_a_folder_without_runs_and_one_that_is_not_there(folder, tmp_path, capsys):
    assert main(["status"]) == 2
    assert "runs: there is no such directory" in capsys.readouterr().err
    folder.mkdir()
    assert main(["status"]) == 0
    assert "there are no runs in runs" in capsys.readouterr().out


def test_without_slurm_it_says_that_the_queue_is_not_known(folder, capsys):
    make_run(folder, "demo", step=7, job="7")

    assert main(["status", "--json"]) == 0

    assert "Slurm does not answer" in capsys.readouterr().err
