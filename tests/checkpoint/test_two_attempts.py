"""An attempt that was stopped and goes on after another one has taken the run over is in nobody's way."""

import json
import threading

import pytest
import torch

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore, open_checkpoint, whole_problem
from forge_core.distributed.mesh import join_process_group
from forge_core.errors import LeaseLostError
from forge_core.run.lease import FILE_NAME, Lease


@pytest.fixture(autouse=True)
def process_group():
    join_process_group(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()


class Attempt:
    """Saves step 7, full of its own value, and stops in the middle of it until it is told to go on."""

    def __init__(self, store, value, may_commit):
        self.stopped, self.told = threading.Event(), threading.Event()
        self.saver = Saver(store, torch.device("cpu"), background=True, timeout=60, may_commit=may_commit)
        self.tensors = {"model.w": torch.full((1000,), value)}

    def save(self):
        self.saver.save(
            Snapshot(
                step=7,
                tokens=0,
                tensors=self.tensors,
                state={},
                mesh={"pp": 1},
                versions={},
                metrics={},
                write_more=self._stop,
            )
        )
        assert self.stopped.wait(60)

    def go_on(self):
        self.told.set()
        saved = self.saver.finish()
        self.saver.close()
        return saved

    def _stop(self, folder):
        self.stopped.set()
        assert self.told.wait(60)
        return {}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def lease(tmp_path):
    lease = Lease(tmp_path, print)
    yield lease
    lease.give_back()


def _take_over(folder):
    path = folder / FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "attempt": "the new one"}))


@pytest.mark.parametrize("collects", [False, True])
def test_the_old_one_neither_commits_nor_touches_what_the_new_one_is_writing(store, lease, tmp_path, collects):
    old, new = Attempt(store, 1.0, lease.refuse_if_lost), Attempt(store, 2.0, lambda: None)
    old.save()
    _take_over(tmp_path)
    if collects:
        store.remove_unfinished()  # as a start does
    new.save()

    error = old.go_on().error
    assert isinstance(error, LeaseLostError) or (collects and "No such file" in str(error))
    assert new.go_on().error is None

    assert store.steps() == [7]
    assert whole_problem(store.folder(7)) is None
    read = {"model.w": torch.zeros(1000)}
    open_checkpoint(store.folder(7)).load(read)
    assert read["model.w"].unique().tolist() == [2.0]
    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step_00000007"]


def test_one_that_looked_at_its_lease_too_early_does_not_move_the_new_ones_checkpoint(store):
    """It is stopped right before it gives its checkpoint a name; meanwhile the new one has collected that folder."""
    new = Attempt(store, 2.0, lambda: None)
    new.save()
    assert new.go_on().error is None

    with pytest.raises(FileNotFoundError):
        store.commit(store.unfinished_folder(7, "old"), 7)

    assert store.steps() == [7]
    assert not (store.path.parent / "checkpoints.aside").exists()
