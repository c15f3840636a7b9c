"""``forge runs``: runs as their files tell of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import attrs
import pytest

from forge_core.cli import main
from forge_core.distributed.process_identity import Process
from forge_plugins_monitor.report.run_record import find_runs
from forge_plugins_monitor.run_states import table

HOUR_AGO = 3600


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def make_run(
    folder: Path,
    name: str,
    *,
    step: int = 0,
    saved: int = 0,
    events: Sequence[tuple[str, int]] = (),
    age: float = HOUR_AGO,
    job: str = "",
) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    (run / "job.toml").write_text(f"[train]\nsteps = 40\n{job}")
    if step:
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


def rows(capsys) -> list[dict]:
    assert main(["runs", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_state_of_a_run_is_told(folder, capsys):
    make_run(folder, "a-finished", step=40, saved=40)
    make_run(folder, "d-stopped", step=9, saved=9, events=[("stopped", 9)])
    make_run(folder, "e-failed", step=9, saved=5, events=[("failed", 9)])
    killed = make_run(folder, "f-killed", step=9, saved=5)
    (killed / "stacks").mkdir()
    (killed / "stacks/fatal_rank_1.txt").write_text("Fatal Python error: Bus error\n\nThread 0x1:\n")
    make_run(folder, "g-prepared")
    make_run(folder, "h-here", step=2, age=1)
    compiles = make_run(folder, "i-compiles", step=2)
    (compiles / "lease.json").write_text(json.dumps(lease_of(Process.this())))
    gone = make_run(folder, "j-gone", step=2, age=1)
    (gone / "lease.json").write_text(json.dumps(lease_of(attrs.evolve(Process.this(), started="1"))))
    (folder / "k-no-run").mkdir()

    found = rows(capsys)

    assert [(row["name"], row["state"], row["reason"]) for row in found] == [
        ("a-finished", "finished", ""),
        ("d-stopped", "stopped", ""),
        ("e-failed", "failed", ""),
        (
            "f-killed",
            "failed",
            "killed by SIGBUS: a file that was being read has become shorter, or a disk has failed",
        ),
        ("g-prepared", "prepared", ""),
        ("h-here", "running", ""),
        ("i-compiles", "running", ""),
        ("j-gone", "failed", ""),
    ]
    failed = found[2]
    assert (failed["step"], failed["steps"], failed["checkpoint"], failed["best"]) == (9, 40, 5, 1.0)
    assert failed["loss"] == pytest.approx(10 / 9)
    assert HOUR_AGO <= failed["age"] < HOUR_AGO + 600


def lease_of(process: Process) -> dict:
    return {"machine": process.machine, "process": process.number, "started": process.started}


def test_a_line_of_metrics_that_is_longer_than_the_tail_is_read(folder, capsys):
    run = make_run(folder, "deep", step=7, events=[("started", 0)])
    norms = {f"layer_norms/{layer}": 0.5 for layer in range(2000)}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "loss": 0.25, **norms}) + "\n")
    error = {"event": "failed", "step": 9, "error": "x" * 40_000}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(error) + "\n")

    (row,) = rows(capsys)

    assert (row["step"], row["loss"], row["state"]) == (9, 0.25, "failed")


def test_runs_of_another_user_that_are_closed_are_left_out(folder, capsys, monkeypatch):
    make_run(folder, "mine", step=7)
    closed = make_run(folder, "theirs", step=7)
    access, stat = os.access, Path.stat

    def refuse(path: Path, **options):
        if closed in path.absolute().parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(
        os, "access", lambda path, mode: closed not in Path(path).absolute().parents and access(path, mode)
    )
    monkeypatch.setattr(Path, "stat", refuse)  # as the system does, though not to the superuser

    assert [row["name"] for row in rows(capsys)] == ["mine"]
    assert [path.name for path in find_runs([folder])] == ["mine"]


def test_a_run_is_told_by_name_in_its_own_directory(folder, capsys, monkeypatch):
    monkeypatch.chdir(make_run(folder, "demo", step=7))

    assert main(["runs", "."]) == 0

    assert "demo" in capsys.readouterr().out


def test_a_table_is_for_people(folder, capsys):
    make_run(folder, "demo", step=7, saved=5)

    assert main(["runs", str(folder / "demo")]) == 0

    shown = capsys.readouterr().out
    assert all(word in shown for word in ("RUN", "demo", "7/40", "1.4286", "1.0000", "5", "1 h ago")), shown
    assert "DIFFERS" not in shown


def test_keys_that_differ_are_told_of_each_run(folder, capsys):
    make_run(folder, "a", step=1, job='seed = 1\n[run]\nname = "a"\n[optimizer]\nname = "adamw"\n')
    make_run(folder, "b", step=1, job='seed = 2\n[run]\nname = "b"\n[optimizer]\nname = "adamw"\nlr = 0.5\n')

    assert [row["differing"] for row in rows(capsys)] == [{"train.seed": 1}, {"train.seed": 2, "optimizer.lr": 0.5}]
    main(["runs"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("ago")[-1].strip() for line in shown[1:]] == ["train.seed=1", "train.seed=2, optimizer.lr=0.5"]


def test_the_best_evaluation_is_that_of_the_job(folder, capsys):
    job = '[checkpoint]\nbest_metric = "eval/perplexity"\nbest_is = "highest"\n'
    run = make_run(folder, "demo", step=1, job=job)
    lines = [{"step": step, "eval/loss": 1.0, "eval/perplexity": value} for step, value in enumerate((2.0, 3.0, 2.5))]
    lines.append({"step": 9, "eval/perplexity": None})  # it was not finite
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert rows(capsys)[0]["best"] == 3.0


@pytest.mark.parametrize("width", [30, 40, 60, 200])
def test_a_terminal_of_any_width_is_not_overrun(folder, capsys, monkeypatch, width):
    make_run(folder, "demo", step=7, saved=5, job="seed = 1\n")
    make_run(folder, "another-with-a-name-of-its-own", step=40, saved=40, job="seed = 2\n")
    monkeypatch.setattr(table, "terminal_width", lambda: width)

    assert main(["runs"]) == 0

    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width, shown
    words = shown.split()
    assert {"demo", "failed", "7/40", "1.4286", "finished", "40/40", "train.seed=2"} <= set(words)


def test_one_run_is_followed_until_it_ends(folder, capsys):
    run = make_run(folder, "demo", step=2, age=1)
    (run / "log.txt").write_text("the first line\n")

    def train() -> None:
        time.sleep(0.7)
        with (run / "log.txt").open("a") as file:
            file.write("the second line\nsaved\n")
        (run / "events.jsonl").write_text(json.dumps({"event": "stopped", "step": 2}) + "\n")

    trainer = Thread(target=train)
    trainer.start()
    assert main(["runs", "-f", str(run)]) == 0
    trainer.join()

    said = capsys.readouterr()
    assert said.out.splitlines() == ["the first line", "the second line", "saved"]
    assert said.err == f"{run} was stopped, and has saved\n"


def test_what_is_not_one_run_cannot_be_followed(folder, capsys):
    make_run(folder, "demo", step=2)

    assert main(["runs", "-f"]) == 2
    assert "-f: runs is not the directory of one run" in capsys.readouterr().err


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

    main(["runs", "--json"])

    assert json.loads(capsys.readouterr().out)[0]["step"] == step


def test_metrics_of_weeks_are_not_read_whole(folder, capsys):
    run = make_run(folder, "long", step=1)
    lines = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 100_001))
    (run / "metrics.jsonl").write_text(lines + '{"step": 100001, "lo')

    main(["runs", "--json"])

    assert json.loads(capsys.readouterr().out)[0]["step"] == 100_000


def test_a_folder_without_runs_and_one_that_is_not_there(folder, tmp_path, capsys):
    assert main(["runs"]) == 2
    assert "runs: there is no such directory" in capsys.readouterr().err
    folder.mkdir()
    assert main(["runs"]) == 0
    assert "there are no runs in runs" in capsys.readouterr().out
