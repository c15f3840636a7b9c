"""``memory_snapshot`` with a stand-in for CUDA's allocator, as the suite runs on machines without a GPU."""

from pathlib import Path
from typing import ClassVar

import attrs
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_monitor import memory_snapshot
from forge_plugins_monitor.config import MemorySnapshotConfig
from forge_plugins_monitor.memory_snapshot import MemorySnapshot
from forge_testing.callback import CallbackConformance


class Over:
    """A module with a few names of its own."""

    def __init__(self, module, **names):
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


class Allocator:
    """Writes what it was told, as torch's allocator writes what was allocated."""

    def __init__(self, monkeypatch) -> None:
        self.calls = []
        # of this module alone: where torch is built for CUDA, the rest of it would look for the GPU
        cuda = Over(torch.cuda, is_available=lambda: True)
        monkeypatch.setattr(memory_snapshot, "torch", Over(torch, cuda=cuda))
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)

    def record(self, enabled="all", *, stacks="all", max_entries=None, clear_history=False):
        self.calls.append((enabled, max_entries, clear_history))

    def dump(self, path):
        Path(path).write_text(repr(self.calls))

    @property
    def is_recording(self):
        return bool(self.calls) and self.calls[-1][0] is not None


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


class TestMemorySnapshot(CallbackConformance):
    component = "forge-plugins-monitor:memory_snapshot"
    config: ClassVar = {"start": 2, "steps": 2, "entries": 500}
    steps = 4

    @pytest.fixture(autouse=True)
    def _cuda(self, allocator):
        self.allocator = allocator

    def test_writes_the_steps_of_the_record_and_then_records_no_more(self, tmp_path) -> None:
        _, run = self.start(tmp_path)

        run.go()

        assert files(tmp_path) == ["steps_2_to_3_rank_0.pickle"]
        assert self.allocator.calls == [("all", 500, True), (None, None, False)]
        (line,) = run.lines
        assert line.endswith("/memory/steps_2_to_3_rank_0.pickle, for pytorch.org/memory_viz")


def files(folder):
    return sorted(path.name for path in folder.glob("memory/*"))


def out_of_memory():
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return wrapped


@pytest.fixture
def snapshot(tmp_path, allocator):
    def make(**config):
        _, small = TestMemorySnapshot().start(tmp_path)
        return MemorySnapshot(MemorySnapshotConfig(**config)), small.run

    return make


def test_a_run_that_is_short_of_memory_writes_its_history_if_that_is_asked_for(tmp_path, snapshot, allocator):
    callback, run = snapshot(on_out_of_memory=True)
    callback.run_start(run)
    assert allocator.is_recording

    error = out_of_memory()
    callback.run_failed(run, 7, error)

    assert files(tmp_path) == ["out_of_memory_step_7_rank_0.pickle"]
    (note,) = error.__notes__
    assert "out_of_memory_step_7_rank_0.pickle, for pytorch.org/memory_viz" in note
    assert not allocator.is_recording


@pytest.mark.parametrize(
    ("config", "error"), [({}, out_of_memory()), ({"on_out_of_memory": True}, RuntimeError("something else"))]
)
def test_another_failure_or_one_outside_of_the_record_writes_nothing(tmp_path, snapshot, config, error):
    callback, run = snapshot(**config)
    callback.run_start(run)

    callback.run_failed(run, 7, error)

    assert files(tmp_path) == []


def test_within_its_steps_it_is_written_in_any_case(tmp_path, snapshot):
    callback, run = snapshot(start=3)
    callback.run_start(run)
    callback.step_start(run, 3)

    callback.run_failed(run, 3, out_of_memory())

    assert files(tmp_path) == ["out_of_memory_step_3_rank_0.pickle"]


def test_the_other_ranks_record_nothing(tmp_path, snapshot, allocator):
    callback, run = snapshot(start=3, ranks=(1,), on_out_of_memory=True)
    run = attrs.evolve(run, world_size=2)
    callback.run_start(run)
    callback.step_start(run, 3)
    callback.run_failed(run, 3, out_of_memory())

    assert allocator.calls == []


def test_a_rank_that_is_not_there_is_refused(snapshot):
    callback, run = snapshot(ranks=(0, 4))

    with pytest.raises(ConfigError, match="there is no rank 4; the run has ranks 0 to 0"):
        callback.run_start(run)


def test_a_machine_without_cuda_is_refused():
    with pytest.raises(ConfigError, match="records the memory of CUDA, and torch sees no GPU on this machine"):
        MemorySnapshot(MemorySnapshotConfig())


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("run.device=cpu", 'records the memory of CUDA, and run.device = "cpu"; take it out'),
        ("train.steps=11", "the record ends with step 12, after the last one, train.steps = 11"),
    ],
)
def test_a_job_that_it_cannot_record_is_refused_at_validation(capsys, key, sentence):
    keys = ["callbacks=[{name='memory_snapshot'}]", key]

    assert main(["validate", "configs/demo.toml", *keys]) == 2

    assert sentence in " ".join(capsys.readouterr().err.split())
