"""Disks that are full or cannot be written to: said in full, nothing lost, and all is well once there is room."""

import os
import subprocess

import pytest
import torch

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore, whole_problem
from forge_core.distributed.mesh import join_process_group
from small_disk import small_disk

MIB = 1 << 20


@pytest.fixture(autouse=True)
def process_group():
    join_process_group(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "8m") as path:
        yield path


def _fill(disk, leave):
    filler = disk / "filler"
    with filler.open("wb") as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        file.write(bytes(free - leave))
    return filler


def _save(store, step, n_bytes=MIB, text="", *, background=False):
    saver = Saver(store, torch.device("cpu"), background=background, timeout=60, may_commit=lambda: None)
    saver.save(
        Snapshot(
            step=step,
            tokens=0,
            tensors={"model.w": torch.full((n_bytes // 4,), float(step))},
            state={"text": text},
            mesh={"pp": 1},
            versions={},
            metrics={},
            write_more=lambda folder: {},
        )
    )
    saved = saver.finish()
    saver.close()
    return saved


def _quiet(line):
    raise AssertionError(line)


# from Python 3.13 on, what torch cannot flush when it frees its writer is told
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("found_out", ["before", "in the tensors", "in the rest"])
def test_a_full_disk_is_named_with_need_and_space_and_the_next_save_works(disk, monkeypatch, found_out, background):
    store = CheckpointStore(disk / "checkpoints")
    assert _save(store, 1).error is None
    filler = _fill(disk, leave=MIB // 2 if found_out != "in the rest" else 2 * MIB)

    with monkeypatch.context() as patch:
        if found_out == "in the tensors":  # something else has filled it meanwhile
            free = iter([1 << 40])
            usage = type("usage", (), {"free": property(lambda self: next(free, MIB // 2))})
            patch.setattr("forge_core.checkpoint.saver.shutil.disk_usage", lambda path: usage())
        text = "x" * (2 * MIB) if found_out == "in the rest" else ""
        error = str(_save(store, 2, text=text, background=background).error)

    assert str(store.path) in error
    assert "the checkpoint needs 1.0 MiB" in error
    assert "free" in error
    if found_out == "in the rest":
        assert "No space left on device" in error
    assert store.steps() == [1]
    assert whole_problem(store.folder(1)) is None
    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step_00000001"]

    filler.unlink()
    assert _save(store, 3, background=background).error is None
    assert store.newest(_quiet).step == 3


def test_a_disk_that_has_become_read_only_is_named(disk):
    store = CheckpointStore(disk / "checkpoints")
    assert _save(store, 1).error is None
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    error = str(_save(store, 2).error)

    assert f"cannot write to {store.path}/.step_00000002." in error
    assert ".partial: Read-only file system; the checkpoint needs 1.0 MiB" in error
    assert store.newest(_quiet).step == 1
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert _save(store, 2).error is None
