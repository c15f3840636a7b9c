"""A run whose disk is full for a while."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main
from forge_core.run import line_file
from forge_core.train import saving
from forge_core.train.trainer import Trainer
from small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "16m") as path:
        yield path


@pytest.fixture
def start(shared_tiny, disk, monkeypatch):
    """Full to the last byte from before step ``since`` (3) until after step 6, or to the end; a checkpoint is written
    every other step. The run may be asked to stop in step ``stop_in``."""
    train_step = Trainer._train_step

    def run(*more, since=3, stop_in=None):
        def step(self, *given):
            if self.step == since:
                fill(self)
            if self.step == stop_in:
                self.run.requests.stop = "SIGTERM"
            counts = train_step(self, *given)
            if self.step == 6:
                (disk / "filler").unlink(missing_ok=True)
            return counts

        monkeypatch.setattr(Trainer, "_train_step", step)
        settings = [f"run.dir={disk}", "checkpoint.interval=2", "checkpoint.background=false"]
        return main(["run", str(shared_tiny.config), *settings, *more])

    def fill(trainer):
        while trainer.saving.is_writing:  # what is being written takes and gives back room
            time.sleep(0.01)
        with (disk / "filler").open("wb", buffering=0) as file:
            file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        trainer.run.log("long" * 1100)  # more than what is left of the file's last page

    return run


def _events(disk, name):
    lines = (disk / "tiny" / "events.jsonl").read_text().splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["event"] == name]


def test_training_goes_on_and_the_next_checkpoint_is_written_once_there_is_room(start, disk, capfd):
    assert start() == 0

    said = capfd.readouterr()
    assert f"saving step 4 failed, training goes on: {disk}/tiny/checkpoints has " in said.out
    assert re.search(r"has [\d.]+ K?i?B free, and the checkpoint needs", said.out)
    assert re.search(rf"cannot write to {disk}/tiny/\S+: No space left on device; lines are kept in memory", said.err)
    store = CheckpointStore(disk / "tiny" / "checkpoints")
    assert store.steps() == [2, 6, 8, 10]
    assert store.newest(print).step == 10
    assert _events(disk, "saved") == [2, 6, 8, 10]
    steps = [json.loads(line)["step"] for line in (disk / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))
    assert "long" * 1100 + "\n" in (disk / "tiny" / "log.txt").read_text()  # held on to until there was room


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize(("since", "stop_in", "last"), [(9, None, 10), (7, 7, 7)], ids=["at its end", "on a signal"])
def test_a_run_whose_last_checkpoint_cannot_be_written_has_failed(
    start, disk, capfd, monkeypatch, background, since, stop_in, last
):
    monkeypatch.setattr(saving, "TRIED_AGAIN_AFTER", (0.01, 0.02, 0.03))
    assert start(f"checkpoint.background={background}", since=since, stop_in=stop_in) == 1

    said = capfd.readouterr()
    assert re.search(r"/tiny/checkpoints has [\d.]+ K?i?B free, and the checkpoint needs", said.err)
    assert "done: " not in said.out
    assert "stopped at step" not in said.out
    again = re.findall(rf"saving step {last} failed, it is tried again in ([\d.]+) s: {disk}/tiny", said.out)
    assert again == ["0.01", "0.02", "0.03"]
    assert CheckpointStore(disk / "tiny" / "checkpoints").newest(print).step < last
    events = [json.loads(line)["event"] for line in (disk / "tiny" / "events.jsonl").read_text().splitlines()]
    assert events[-5:] == [*["save_failed"] * 4, "failed"]


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_last_checkpoint_of_a_run_is_written_once_there_is_room(start, disk, capfd, monkeypatch, background):
    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            (disk / "filler").unlink()

    waited = []
    monkeypatch.setattr(saving, "time", SimpleNamespace(sleep=wait, monotonic=time.monotonic))

    with pytest.raises(SystemExit) as left:
        start(f"checkpoint.background={background}", "checkpoint.interval=0", since=7, stop_in=7)

    assert left.value.code == 3
    assert waited == [*saving.TRIED_AGAIN_AFTER[:2]]
    assert CheckpointStore(disk / "tiny" / "checkpoints").newest(print).step == 7
    assert _events(disk, "save_failed") == [7, 7]


def test_a_run_that_must_not_go_on_without_checkpoints_ends(start, disk, capfd):
    assert start("checkpoint.on_failure=stop") == 1

    assert re.search(r"/tiny/checkpoints has [\d.]+ K?i?B free", capfd.readouterr().err)
    assert CheckpointStore(disk / "tiny" / "checkpoints").newest(print).step == 2


def test_a_start_on_a_full_disk_is_refused(start, disk, capfd):
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))

    assert start() == 2

    assert f"run.dir: cannot write to {disk}/tiny: No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize(("again_at", "missing"), [(8, 0), (None, 8)])
def test_lines_of_metrics_wait_for_a_file_that_can_be_written_and_are_counted_if_it_never_can(
    tiny, capfd, monkeypatch, again_at, missing
):
    write, written = os.write, []

    def failing(file, text):
        if Path(f"/proc/self/fd/{file}").readlink().name == "metrics.jsonl":
            written.append(text)
            if len(written) > 2 and (again_at is None or len(written) < again_at):
                raise OSError(5, "Input/output error")
        return write(file, text)

    monkeypatch.setattr(line_file.os, "write", failing)

    assert main(["run", str(tiny.config), "train.steps=10"]) == 0

    assert [line["step"] for line in tiny.metrics()] == [*range(1, 11 - missing)]
    said = capfd.readouterr().err
    assert said.count("metrics.jsonl: Input/output error; lines are kept in memory until it works again") == 1
    assert (f"could not be written: {missing} of metrics.jsonl" in said) is (missing > 0)
