"""How busy, how warm and how full the GPUs of a run are, over time."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_plugins_monitor.config import GpuMetricsConfig
from forge_plugins_monitor.nvml import METERS, Nvml

_MEANS = ("utilization", "power_watts")
"""The others are of the rank that is worst off: the highest, and of clocks the lowest."""


class GpuMetrics(Callback):
    """Reports in logged steps what NVML reads off the GPUs, as ``gpu/utilization`` and so on (``METERS``).

    The driver answers the host, which waits for no device; ranks agree by two collectives on five numbers. Values that
    not all GPUs know are left out. Where the driver has no answer later, they are not a number.

    Raises:
        ConfigError: from the constructor, if this machine has no CUDA.
    """

    def __init__(self, config: GpuMetricsConfig) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("gpu_metrics asks the driver of GPUs, and torch sees none on this machine; take it out")
        self._gpu: Nvml | None = None
        self._known: list[str] = []

    def run_start(self, run: RunContext) -> None:
        why = ""
        try:
            self._gpu = Nvml(run.device)
            now = self._gpu.meters()
        except RuntimeError as error:
            now, why = dict.fromkeys(METERS, math.nan), f": {error}"
        known = torch.tensor([not math.isnan(now[name]) for name in METERS], dtype=torch.int32, device=run.device)
        if run.world_size > 1:
            dist.all_reduce(known, dist.ReduceOp.MIN)
        self._known = [name for name, is_known in zip(METERS, known.tolist(), strict=True) if is_known]
        left_out = ", ".join(f"gpu/{name}" for name in METERS if name not in self._known)
        if left_out:
            run.log(f"gpu_metrics: not all GPUs of the run tell {left_out}{why}")

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if not context.logged or not self._known:
            return
        now = self._now()
        means, most = (torch.zeros(len(METERS), dtype=torch.float64, device=run.device) for _ in range(2))
        for place, name in enumerate(METERS):
            means[place].fill_(now[name])
            most[place].fill_(-now[name] if name == "sm_clock_mhz" else now[name])
        if run.world_size > 1:
            dist.all_reduce(means)
            dist.all_reduce(most, dist.ReduceOp.MAX)
        stages = run.mesh.degrees["pp"]  # over which values are summed
        worst = {name: most[place] / stages for place, name in enumerate(METERS)}
        worst["sm_clock_mhz"] = -worst["sm_clock_mhz"]
        mean = {name: means[place] / (run.world_size * stages) for place, name in enumerate(METERS)}
        run.report({f"gpu/{name}": (mean if name in _MEANS else worst)[name] for name in self._known})

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        self._close()

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._close()

    def _now(self) -> dict[str, float]:
        try:
            assert self._gpu is not None
            return self._gpu.meters()
        except RuntimeError:  # if the GPU itself is gone, training finds that out
            return dict.fromkeys(METERS, math.nan)

    def _close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None
