"""What is copied from a GPU is what has been computed by then, and nothing that is computed later."""

from types import SimpleNamespace

import pytest
import torch

from forge_core.checkpoint import saver as saver_module
from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore
from forge_core.distributed.mesh import join_process_group

A_WHILE = 2_000_000_000
"""Clock cycles of the device: about a second."""


def _snapshot(weight):
    return Snapshot(
        step=1,
        tokens=0,
        tensors={"model.w": weight},
        state={},
        mesh={"pp": 1},
        versions={},
        metrics={},
        write_more=lambda folder: {},
    )


@pytest.fixture
def process_group():
    join_process_group(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("background", [True, False])
def test_a_save_waits_for_what_is_under_way_and_is_waited_for_before_a_step(tmp_path, process_group, background):
    device = torch.device("cuda", 0)
    store = CheckpointStore(tmp_path / "checkpoints")
    saver = Saver(store, device, background=background, timeout=60, may_commit=lambda: None)
    weight = torch.zeros(64 << 20, device=device)
    torch.cuda.synchronize()

    torch.cuda._sleep(A_WHILE)
    weight.fill_(1.0)
    saver.save(_snapshot(weight))
    saver.wait_until_copied()
    weight.fill_(2.0)
    saved = saver.finish()
    saver.close()

    assert saved.error is None
    read = {"model.w": torch.zeros(64 << 20)}
    store.at(1, print).load(read)
    assert read["model.w"].unique().tolist() == [1.0]


def test_the_device_is_waited_for_before_anything_is_copied(tmp_path, process_group, monkeypatch):
    """The order alone, for machines without a GPU."""
    done = []

    class Stream:
        def synchronize(self):
            done.append("waited")

    class Stager:
        def __init__(self, options):
            assert options.use_async_staging
            self._state_dict_stager = SimpleNamespace(close=lambda: done.append("released"))

        def stage(self, tensors):
            done.append("copied")
            return tensors

        def close(self):
            pass

    monkeypatch.setattr(saver_module, "DefaultStager", Stager)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    store = CheckpointStore(tmp_path / "checkpoints")
    saver = Saver(store, torch.device("cuda", 0), background=True, timeout=60, may_commit=lambda: None)

    saver.save(_snapshot(torch.ones(3)))

    assert saver.finish().error is None
    saver.close()
    assert done == ["waited", "copied", "released"]
