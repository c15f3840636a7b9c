"""A run whose disk is full for a while."""

import json
import os
import re
import subprocess

import pytest

from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main
from forge_core.engine.trainer import Trainer


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def start(shared_tiny, disk, monkeypatch):
    """Full to the last byte from before step 3 until after step 6; a checkpoint is written every other step."""
    train_step = Trainer._train_step

    def step(self, *given):
        if self.step == 3:
            with (disk / "filler").open("wb", buffering=0) as file:
                file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
            self.context.log("long" * 1100)  # more than what is left of the file's last page
        train_step(self, *given)
        if self.step == 6:
            (disk / "filler").unlink()

    monkeypatch.setattr(Trainer, "_train_step", step)
    settings = [f"run.dir={disk}", "checkpoint.interval=2", "checkpoint.background=false"]
    return lambda *more: main(["run", str(shared_tiny.config), *settings, *more])


def _events(disk, name):
    lines = (disk / "tiny" / "events.jsonl").read_text().splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["event"] == name]


def test_training_goes_on_and_the_next_checkpoint_is_written_once_there_is_room(start, disk, capfd):
    assert start() == 0

    said = capfd.readouterr()
    assert f"saving step 4 failed, training goes on: {disk}/tiny/checkpoints has " in said.out
    assert re.search(r"has [\d.]+ K?i?B free, and the checkpoint needs", said.out)
    assert f"cannot write to {disk}/tiny: No space left on device; lines may be missing there" in said.err
    store = CheckpointStore(disk / "tiny" / "checkpoints")
    assert store.steps() == [2, 6, 8, 10]
    assert store.newest(print).step == 10
    assert _events(disk, "saved") == [2, 6, 8, 10]
    steps = [json.loads(line)["step"] for line in (disk / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))
    assert "long" * 1100 + "\n" in (disk / "tiny" / "log.txt").read_text()  # held on to until there was room


def test_a_run_that_must_not_go_on_without_checkpoints_ends(start, disk, capfd):
    assert start("checkpoint.on_failure=stop") == 1

    assert re.search(r"/tiny/checkpoints has [\d.]+ K?i?B free", capfd.readouterr().err)
    assert CheckpointStore(disk / "tiny" / "checkpoints").newest(print).step == 2


def test_a_start_on_a_full_disk_is_refused(start, disk, capfd):
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))

    assert start() == 2

    assert f"run.dir: cannot write to {disk}/tiny: No space left on device" in capfd.readouterr().err
