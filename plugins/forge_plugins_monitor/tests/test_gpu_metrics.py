"""``gpu_metrics`` with a stand-in for NVML, of which there is none without a GPU."""

import math
from contextlib import ExitStack
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import attrs
import pynvml
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_monitor.config import GpuMetricsConfig
from forge_plugins_monitor.gpu_metrics import GpuMetrics
from forge_plugins_monitor.nvml import METERS, Nvml
from forge_testing.callback import CallbackConformance
from forge_testing.several_ranks import on_ranks


def driver(*, utilization=50, milliwatts=650_500, degrees=61, used=3 * 2**29, clock=1980):
    """NVML's functions as they answer about one GPU; an error is raised."""
    answers = {
        "Init": None,
        "Shutdown": None,
        "DeviceGetHandleByUUID": "handle",
        "DeviceGetUtilizationRates": utilization,
        "DeviceGetPowerUsage": milliwatts,
        "DeviceGetTemperature": degrees,
        "DeviceGetMemoryInfo": SimpleNamespace(used=used),
        "DeviceGetClockInfo": clock,
    }
    if isinstance(utilization, int):
        answers["DeviceGetUtilizationRates"] = SimpleNamespace(gpu=utilization, memory=1)
    stack = ExitStack()
    functions = {
        f"nvml{name}": mock.Mock(**{"side_effect" if isinstance(answer, Exception) else "return_value": answer})
        for name, answer in answers.items()
    }
    stack.enter_context(mock.patch.multiple(pynvml, **functions))
    stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
    # optimizers ask both once there is a GPU; torch for CUDA then asks the driver, of which there is none
    stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False))
    asked = "_accelerator_graph_capture_health_check"  # of torch 2.15
    stack.enter_context(mock.patch.object(torch.optim.Optimizer, asked, mock.Mock(), create=True))
    stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(uuid="u")))
    return stack


class TestGpuMetrics(CallbackConformance):
    component = "forge-plugins-monitor:gpu_metrics"
    config: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _gpu(self):
        with driver():
            yield

    def make(self, **given):
        """Other ranks are processes that no fixture reaches: they have CUDA and no NVML."""
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            return super().make(**given)

    def test_logged_steps_say_what_the_driver_says_and_others_do_not_ask_it(self, tmp_path) -> None:
        callback, small = self.start(tmp_path)
        reported = []
        run = attrs.evolve(small.run, report=lambda values: reported.append(numbers(values)))

        callback.run_start(run)
        asked = pynvml.nvmlDeviceGetUtilizationRates.call_count
        callback.step_end(run, _Step(logged=False))
        assert pynvml.nvmlDeviceGetUtilizationRates.call_count == asked
        callback.step_end(run, _Step(logged=True))
        callback.run_end(run, 2, "")

        assert reported == [
            {
                "gpu/utilization": 0.5,
                "gpu/power_watts": 650.5,
                "gpu/temperature": 61.0,
                "gpu/memory_used_gib": 1.5,
                "gpu/sm_clock_mhz": 1980.0,
            }
        ]
        assert small.lines == []
        pynvml.nvmlShutdown.assert_called_once_with()

    def test_what_a_gpu_does_not_know_is_said_once_and_left_out(self, tmp_path) -> None:
        callback, small = self.start(tmp_path)
        reported = []
        run = attrs.evolve(small.run, report=lambda values: reported.append(numbers(values)))

        with driver(utilization=pynvml.NVMLError_NotSupported(), milliwatts=pynvml.NVMLError_NotSupported()):
            callback.run_start(run)
            callback.step_end(run, _Step(logged=True))

        assert small.lines == ["gpu_metrics: not all GPUs of the run tell gpu/utilization, gpu/power_watts"]
        assert list(reported[0]) == ["gpu/temperature", "gpu/memory_used_gib", "gpu/sm_clock_mhz"]

    def test_a_driver_that_does_not_answer_is_said_at_the_start(self, tmp_path) -> None:
        callback, small = self.start(tmp_path)
        run = attrs.evolve(small.run, report=lambda values: pytest.fail(f"reported {values}"))

        with mock.patch.object(pynvml, "nvmlInit", side_effect=pynvml.NVMLError_LibraryNotFound()):
            callback.run_start(run)
        callback.step_end(run, _Step(logged=True))

        assert small.lines[0].endswith("gpu/sm_clock_mhz: NVML: NVML Shared Library Not Found")

    def test_a_driver_that_fails_later_gives_no_numbers_and_the_run_goes_on(self, tmp_path) -> None:
        callback, small = self.start(tmp_path)
        reported = []
        run = attrs.evolve(small.run, report=lambda values: reported.append(numbers(values)))

        callback.run_start(run)
        with driver(degrees=pynvml.NVMLError_GpuIsLost()):
            callback.step_end(run, _Step(logged=True))
        callback.step_end(run, _Step(logged=True))

        assert all(math.isnan(value) for value in reported[0].values())
        assert reported[1]["gpu/temperature"] == 61.0


def numbers(values):
    return {name: float(value) for name, value in values.items()}


@attrs.frozen
class _Step:
    logged: bool


class OnTwoRanks:
    def reported(self):
        return self.of_a_step(knows_power=True)

    def reported_without_power(self):
        return self.of_a_step(knows_power=False)

    def of_a_step(self, *, knows_power):
        import torch.distributed as dist

        rank = dist.get_rank()
        power = pynvml.NVMLError_NotSupported() if rank and not knows_power else 100_000 * (rank + 1)
        seen, lines = [], []
        run = _Run(rank, report=lambda values: seen.append(numbers(values)), log=lines.append)
        with driver(
            utilization=100 - 50 * rank, milliwatts=power, degrees=60 + rank, used=2**31 >> rank, clock=1980 - rank
        ):
            callback = GpuMetrics(GpuMetricsConfig())
            callback.run_start(run)
            callback.step_end(run, _Step(logged=True))
        return seen[0], lines


@attrs.frozen
class _Mesh:
    degrees: ClassVar = {"pp": 2}


@attrs.frozen
class _Run:
    rank: int
    report: object
    log: object
    device: str = "cpu"
    world_size: int = 2
    mesh: _Mesh = _Mesh()


def test_ranks_report_means_and_the_one_that_is_worst_off_and_add_up_over_pipeline_stages():
    whole = {
        "gpu/utilization": 0.375,
        "gpu/power_watts": 75.0,
        "gpu/temperature": 30.5,
        "gpu/memory_used_gib": 1.0,
        "gpu/sm_clock_mhz": 989.5,
    }
    assert on_ranks(OnTwoRanks, "reported", 2) == [(whole, [])] * 2


def test_all_ranks_leave_out_what_one_does_not_know():
    found = on_ranks(OnTwoRanks, "reported_without_power", 2)

    assert [list(seen) for seen, _ in found] == [[f"gpu/{name}" for name in METERS if name != "power_watts"]] * 2
    assert [lines for _, lines in found] == [["gpu_metrics: not all GPUs of the run tell gpu/power_watts"]] * 2


def test_a_machine_without_cuda_is_refused():
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(ConfigError, match="asks the driver of GPUs, and torch sees none on this machine"),
    ):
        GpuMetrics(GpuMetricsConfig())


def test_a_job_on_a_cpu_is_refused_at_validation(capsys):
    assert main(["validate", "configs/demo.toml", "callbacks=['gpu_metrics']", "run.device=cpu"]) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert 'gpu_metrics asks the driver of GPUs, and run.device = "cpu"; take it out' in said


@pytest.mark.gpu
def test_a_real_gpu_answers():
    nvml = Nvml(torch.device("cuda", 0))

    meters = nvml.meters()

    assert tuple(meters) == METERS
    assert 0 < meters["temperature"] < 120
    assert 0 < meters["memory_used_gib"] < 1000
    nvml.close()
