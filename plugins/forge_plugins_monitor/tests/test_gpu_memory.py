"""``gpu_memory`` with a stand-in for the statistics of CUDA's allocator."""

from typing import ClassVar
from unittest import mock

import attrs
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_monitor.config import GpuMemoryConfig
from forge_plugins_monitor.gpu_memory import GpuMemory
from forge_testing.callback import CallbackConformance
from forge_testing.several_ranks import on_ranks

STATS = {"reserved_bytes.all.peak": 3 * 2**29, "num_alloc_retries": 2}


class TestGpuMemory(CallbackConformance):
    component = "forge-plugins-monitor:gpu_memory"
    config: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)

    def make(self, **given):
        """Other ranks are processes that no fixture reaches."""
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            return super().make(**given)

    def test_logged_steps_say_what_is_held_and_how_often_it_ran_short(self, tmp_path) -> None:
        callback, run = self.start(tmp_path)
        reported = []
        context = attrs.evolve(run.run, report=lambda values: reported.append({k: float(v) for k, v in values.items()}))

        callback.step_end(context, _Step(logged=False))
        callback.step_end(context, _Step(logged=True))

        assert reported == [{"memory_reserved_gib": 1.5, "memory_retries": 2.0}]


@attrs.frozen
class _Step:
    logged: bool


class OnTwoRanks:
    def reported(self):
        import torch.distributed as dist

        torch.cuda.is_available = lambda: True
        rank = dist.get_rank()
        torch.cuda.memory_stats = lambda device: {
            "reserved_bytes.all.peak": (rank + 1) * 2**30,
            "num_alloc_retries": 5 - rank,
        }
        seen = []
        run = _Run(report=lambda values: seen.append({name: float(one) for name, one in values.items()}))
        GpuMemory(GpuMemoryConfig()).step_end(run, _Step(logged=True))
        return seen


@attrs.frozen
class _Mesh:
    degrees: ClassVar = {"pp": 2}


@attrs.frozen
class _Run:
    report: object
    device: str = "cpu"
    world_size: int = 2
    mesh: _Mesh = _Mesh()


def test_it_is_of_the_rank_that_has_most_and_adds_up_over_pipeline_stages():
    assert on_ranks(OnTwoRanks, "reported", 2) == [[{"memory_reserved_gib": 1.0, "memory_retries": 2.5}]] * 2


def test_a_machine_without_cuda_is_refused():
    with pytest.raises(ConfigError, match="reports the memory of CUDA, and torch sees no GPU on this machine"):
        GpuMemory(GpuMemoryConfig())


def test_a_job_on_a_cpu_is_refused_at_validation(capsys):
    assert main(["validate", "configs/demo.toml", "callbacks=['gpu_memory']", "run.device=cpu"]) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert 'gpu_memory reports the memory of CUDA, and run.device = "cpu"; take it out' in said
