"""Which checkpoints a run writes and removes when it begins with those of an earlier start."""

import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main
from forge_core.train.trainer import Trainer

SETTINGS = ["data.workers=0", "checkpoint.background=false", "scheduler.decay_steps=8"]


def _run(tiny, *overrides):
    return main(["run", str(tiny.config), *SETTINGS, *overrides])


def _store(tiny):
    return CheckpointStore(tiny.path() / "checkpoints")


def _saved(tiny):
    events = map(json.loads, (tiny.path() / "events.jsonl").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "saved"]


def test_the_untrained_model_is_saved_once_however_often_the_run_is_started(tiny, monkeypatch):
    window = ["checkpoint.powers_of_two_from=0", "checkpoint.powers_of_two_until=4", "train.steps=3"]

    def dies(self, microbatches):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", dies)
        for _ in range(2):
            assert _run(tiny, *window) == 1
    assert _run(tiny, *window) == 0

    assert _saved(tiny) == [0, 1, 2, 3]
    assert not (tiny.path() / "checkpoints.aside").exists()


@pytest.mark.parametrize("harm", ["given another step's name", "damaged"])
def test_what_was_passed_over_does_not_count_among_those_to_keep(tiny, harm):
    assert _run(tiny, "train.steps=4", "checkpoint.interval=2") == 0
    store = _store(tiny)
    if harm == "damaged":
        file = next(store.folder(4).glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])
    else:
        shutil.copytree(store.folder(2), store.folder(99))
        shutil.rmtree(store.folder(4))

    assert _run(tiny, "train.steps=3", "checkpoint.interval=0", "checkpoint.keep_last=1") == 0

    assert store.steps() == [3, 4 if harm == "damaged" else 99]
    assert store.newest(lambda line: None).step == 3


def test_a_checkpoint_is_saved_after_so_many_minutes(tiny, monkeypatch):
    passed = [0]
    train_step, monotonic = Trainer._train_step, time.monotonic

    def slow(self, microbatches):
        passed[0] += 25
        return train_step(self, microbatches)

    monkeypatch.setattr(Trainer, "_train_step", slow)
    clock = SimpleNamespace(monotonic=lambda: monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr("forge_core.train.saving.time", clock)

    assert _run(tiny, "train.steps=8", "checkpoint.minutes=1", "checkpoint.interval=0") == 0

    assert _saved(tiny) == [3, 6, 8]


class SlowStager:
    """Copies in a thread, as on a GPU, and begins late."""

    def __init__(self, options):
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._state_dict_stager = self._stager._state_dict_stager
        self._thread = ThreadPoolExecutor(1)

    def stage(self, tensors) -> Future:
        def late():
            time.sleep(0.5)
            return self._stager.stage(tensors)

        return self._thread.submit(late)

    def close(self):
        self._thread.shutdown()
        self._stager.close()


def test_no_step_changes_what_is_still_being_copied(tiny, monkeypatch):
    settings = ["train.steps=4", "checkpoint.interval=2"]
    assert _run(tiny, *settings) == 0
    monkeypatch.setattr("forge_core.checkpoint.saver.DefaultStager", SlowStager)
    assert _run(tiny, *settings, "run.name=slow", "checkpoint.background=true") == 0

    read = []
    for name in ("tiny", "slow"):
        checkpoint = CheckpointStore(tiny.path(name) / "checkpoints").at(2, print)
        tensors = {
            key: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for key, entry in checkpoint.saved_tensors().items()
        }
        checkpoint.load(tensors)
        read.append(tensors)
    expected, found = read
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
