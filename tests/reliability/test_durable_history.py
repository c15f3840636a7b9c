"""What a power cut leaves of a run's own files once a checkpoint is committed: the history up to there.

Every flush is seen, and nothing else counts as being on the disk; real power cuts are in ``test_power_cut.py``.
"""

import json
import os
import shlex
import stat
import sys
import tomllib
from pathlib import Path

import pytest

from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main
from forge_core.run.directory import BETWEEN_STARTS
from tests.system.conftest import tiny  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says which file is flushed")


class Disk:
    """Of each file, what it held when it was last flushed; of each folder, the names it had then."""

    def __init__(self):
        self._contents, self._names = {}, {}

    def flushed(self, handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            self._names[path] = {entry.name: entry.stat().st_ino for entry in path.iterdir() if entry.is_file()}
        else:
            self._contents[status.st_ino] = path.read_text(errors="replace") if path.exists() else ""

    def after_a_power_cut(self, folder):
        """Text by name."""
        return {name: self._contents.get(inode, "") for name, inode in self._names.get(folder, {}).items()}


@pytest.fixture
def left(monkeypatch):
    """By the step of a checkpoint: what is left of the run's folder if the power goes as soon as it is committed."""
    disk, found, fsync, commit = Disk(), {}, os.fsync, CheckpointStore.commit

    def seen(handle):
        fsync(handle)
        disk.flushed(handle if isinstance(handle, int) else handle.fileno())

    def committed(self, unfinished, step):
        commit(self, unfinished, step)
        found[step] = disk.after_a_power_cut(self.path.parent)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(CheckpointStore, "commit", committed)
    return found


@pytest.mark.parametrize("background", ["true", "false"])
def test_files_of_a_run_are_durable_up_to_each_checkpoint(tiny, left, background):  # noqa: F811
    run = ["run", str(tiny.config), "checkpoint.interval=3", f"checkpoint.background={background}"]
    assert main([*run, "train.steps=7", "eval.interval=3"]) == 0
    assert main([*run, "train.steps=10", "eval.interval=3"]) == 0

    assert [*left] == [3, 6, 7, 9, 10]
    commands = [json.loads(files["environment.json"])["command"] for files in left.values()]
    assert commands[2:4] == [shlex.join(["forge", *run, f"train.steps={n}", "eval.interval=3"]) for n in (7, 10)]
    for step, files in left.items():
        metrics = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
        assert [line["step"] for line in metrics if "loss" in line][:step] == [*range(1, step + 1)]
        assert step in [line["step"] for line in metrics if "eval/loss" in line]
        events = [json.loads(line)["event"] for line in files["events.jsonl"].splitlines()]
        assert events.count("started") == 1
        assert ("resumed" in events) is (step > 7)
        assert tomllib.loads(files["job.toml"])["train"]["steps"] == (7 if step <= 7 else 10)
        assert json.loads(files["environment.json"])["mesh"]["tp"] == 1
        assert "parameters, fp32 on cpu" in files["log.txt"]


def test_that_a_run_has_begun_afresh_is_remembered_before_it_commits_anything(tiny, left):  # noqa: F811
    run = ["run", str(tiny.config), "train.steps=4", "checkpoint.interval=2"]
    assert main(run) == 0
    assert main([*run, "--resume", "never"]) == 0
    jobs = {step: tomllib.loads(files["job.toml"]) for step, files in left.items()}
    assert [jobs[step]["checkpoint"]["resume"] for step in (2, 4)] == ["never", "never"]

    (tiny.path() / "job.toml").write_text(left[2]["job.toml"])
    assert main([*run, "--resume", "never"]) == 0

    events = [json.loads(line)["event"] for line in (tiny.path() / "events.jsonl").read_text().splitlines()]
    assert events.count("started") == 2
    assert len(list((tiny.path() / "checkpoints.aside").iterdir())) == 2


def test_torn_last_lines_are_cut_off_when_a_run_goes_on(tiny):  # noqa: F811
    run = ["run", str(tiny.config), "checkpoint.interval=2"]
    assert main([*run, "train.steps=4"]) == 0
    for name, torn in {
        "metrics.jsonl": '{"step": 5, "lo',
        "events.jsonl": '{"time": "20',
        "log.txt": "step 5/1",
    }.items():
        with (tiny.path() / name).open("ab") as file:
            file.write(torn.encode() + bytes(5000))  # a file system may have room for what it never wrote

    assert main([*run, "train.steps=6"]) == 0

    assert [line["step"] for line in tiny.metrics()] == [*range(1, 7)]
    events = [json.loads(line)["event"] for line in (tiny.path() / "events.jsonl").read_text().splitlines()]
    assert events == ["started", *["saved"] * 2, "completed", "resumed", "saved", "completed"]
    log = (tiny.path() / "log.txt").read_text()
    assert "step 5/1" not in log
    assert "\0" not in log
    first, second = log.split(f"\n{BETWEEN_STARTS}\n")
    assert "done: 4 steps in " in first
    assert "done: 6 steps, the last 2 in " in second
    assert not (tiny.path() / "metrics.jsonl.aside").exists()
