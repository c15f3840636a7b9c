"""What ``health`` says, and when it ends a run."""

from unittest import mock

import attrs
import pynvml
import pytest
import torch

from forge_core.contracts.callback import StepContext
from forge_plugins_monitor import health
from forge_plugins_monitor.config import HealthConfig
from forge_plugins_monitor.health import Health
from forge_plugins_monitor.nvml import GpuState, Nvml
from forge_testing.callback import SmallRun

WELL = GpuState("GPU 3 (H100)", memory_errors=0, waits_for_reset=False, slowed_down_by=(), free=0.5)


class Driver:
    """Stands in for NVML, of which there is none without a GPU."""

    def __init__(self, *states):
        self.states = list(states)
        self.closed = False

    def look(self):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def close(self):
        self.closed = True


def run_with(tmp_path, *states, steps=3, **config):
    """A run whose GPU is found in these states, one after the other."""
    callback, driver = Health(HealthConfig(interval=1, **config)), Driver(*states)
    small = SmallRun(callback, tmp_path, steps)
    run = attrs.evolve(small.run, device=torch.device("cuda"))
    with mock.patch.object(health, "Nvml", return_value=driver):
        callback.run_start(run)
    for step in range(1, steps + 1):
        callback.step_end(run, StepContext(step, 0, {}, logged=False))
    callback.run_end(run, steps, "")
    assert driver.closed
    return run.requests.stop, small.lines


def test_a_healthy_run_hears_nothing(tmp_path):
    assert run_with(tmp_path, WELL) == ("", [])


def test_memory_errors_that_come_up_stop_the_run_and_older_ones_do_not(tmp_path):
    old = attrs.evolve(WELL, memory_errors=4)
    new = attrs.evolve(WELL, memory_errors=6)

    assert run_with(tmp_path, old) == ("", [])
    stop, lines = run_with(tmp_path, old, old, new)
    assert stop == lines[0] == "health: GPU 3 (H100) has had 2 uncorrected memory errors since the run began"
    assert len(lines) == 1
    assert run_with(tmp_path, old, new, on_memory_errors="warn")[0] == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slowed_down_by": ("its heat", "its power supply")}, "is slowed down by its heat and its power supply"),
        ({"waits_for_reset": True}, "has broken memory that a reset would take out of use"),
        ({"free": 0.01}, "has less than 2% of its memory free"),
    ],
)
def test_what_is_found_is_told_once_until_it_changes(tmp_path, change, said):
    ill = attrs.evolve(WELL, **change)

    stop, lines = run_with(tmp_path, WELL, ill, ill, WELL, ill, steps=4)

    assert stop == ""
    assert lines == [f"health: GPU 3 (H100) {said}"] * 2


def test_memory_that_is_asked_for_twice_is_told_once(tmp_path, monkeypatch):
    retries = iter([0, 2, 3, 3])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": next(retries)})

    stop, lines = run_with(tmp_path, WELL, steps=4)

    assert stop == ""
    assert [line[:51] for line in lines] == ["health: GPU 3 (H100) has no memory left in one piec"]


def test_a_driver_that_fails_meanwhile_is_not_asked_again_and_does_not_end_the_run(tmp_path):
    lost = RuntimeError("NVML: Unknown Error")

    stop, lines = run_with(tmp_path, WELL, WELL, lost, WELL, steps=4)

    assert stop == ""
    assert lines == ["health: GPU 3 (H100) is not looked at any more: NVML: Unknown Error"]


def test_whatever_the_driver_says_is_one_kind_of_error():
    """Only what a GPU does not support is left out; the rest is said in one way."""
    nvml = object.__new__(Nvml)
    nvml._nvml, nvml._handle = pynvml, None

    with mock.patch.multiple(
        pynvml,
        nvmlDeviceGetCurrentClocksThrottleReasons=mock.Mock(side_effect=pynvml.NVMLError_NotSupported()),
        nvmlDeviceGetMemoryInfo=mock.Mock(side_effect=pynvml.NVMLError_GpuIsLost()),
        nvmlShutdown=mock.Mock(side_effect=pynvml.NVMLError_Uninitialized()),
    ):
        with pytest.raises(RuntimeError, match="NVML: "):
            nvml.look()
        nvml.close()


def test_the_memory_of_the_host_is_looked_at(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 15 kB\n")

    assert 0 < health.host_memory_free() <= 1
    monkeypatch.setattr(health, "_MEMINFO", meminfo)
    assert health.host_memory_free() == pytest.approx(0.015)
    assert run_with(tmp_path, WELL)[1] == ["health: less than 2% of the host's memory is free"]
    assert run_with(tmp_path, WELL, least_free=0.01)[1] == []


@pytest.mark.gpu
def test_a_real_gpu_answers():
    nvml = Nvml(torch.device("cuda", 0))

    state = nvml.look()

    assert torch.cuda.get_device_name(0) in state.name
    assert 0 < state.free <= 1
    nvml.close()
