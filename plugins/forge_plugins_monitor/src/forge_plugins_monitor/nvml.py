"""What NVIDIA's driver says about the GPU of this process."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import attrs
import torch

_HARDWARE_SLOWDOWNS = {
    "nvmlClocksThrottleReasonHwThermalSlowdown": "its heat",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "its heat",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "its power supply",
}

METERS = ("utilization", "power_watts", "temperature", "memory_used_gib", "sm_clock_mhz")
"""The part of the last second, or less, in which a kernel ran; W; °C; GiB of all processes; MHz."""


@attrs.frozen
class GpuState:
    """One look at one GPU."""

    name: str
    """Such as ``GPU 3 (NVIDIA H100)``, by its number on the host."""
    memory_errors: int | None
    """Uncorrected ones since the driver was loaded or the GPU reset; ``None`` where it does not count them."""
    waits_for_reset: bool
    """Whether broken memory is taken out of use at the next reset."""
    slowed_down_by: tuple[str, ...]
    """Why its hardware has lowered its clocks, if it has."""
    free: float
    """The part of its memory that no process uses, this one included."""


class Nvml:
    """Opened for as long as the run.

    Raises:
        RuntimeError: from the constructor, ``look`` and ``meters``; the driver gives no answer.
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml  # type: ignore[import-untyped]  # it has no types

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            # not by its number: CUDA_VISIBLE_DEVICES changes that
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from error

    def look(self) -> GpuState:
        """Ask the driver; takes well below a millisecond."""
        try:
            return self._look()
        except self._nvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from error

    def meters(self) -> dict[str, float]:
        """``METERS``; not a number where this GPU does not know."""
        nvml = self._nvml
        try:
            rates = self._supported(nvml.nvmlDeviceGetUtilizationRates)
            milliwatts = self._supported(nvml.nvmlDeviceGetPowerUsage)
            degrees = self._supported(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
            memory = self._supported(nvml.nvmlDeviceGetMemoryInfo)
            clock = self._supported(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        except nvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from error
        return {
            "utilization": math.nan if rates is None else rates.gpu / 100,
            "power_watts": math.nan if milliwatts is None else milliwatts / 1000,
            "temperature": math.nan if degrees is None else degrees,
            "memory_used_gib": math.nan if memory is None else memory.used / 2**30,
            "sm_clock_mhz": math.nan if clock is None else clock,
        }

    def _look(self) -> GpuState:
        nvml, handle = self._nvml, self._handle
        reasons = self._supported(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        rows = self._supported(nvml.nvmlDeviceGetRemappedRows)  # corrected, uncorrected, pending, failure
        return GpuState(
            name=f"GPU {nvml.nvmlDeviceGetIndex(handle)} ({nvml.nvmlDeviceGetName(handle)})",
            memory_errors=self._supported(
                nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            waits_for_reset=bool(rows and (rows[2] or rows[3])),
            slowed_down_by=tuple(
                dict.fromkeys(why for name, why in _HARDWARE_SLOWDOWNS.items() if reasons & getattr(nvml, name))
            ),
            free=memory.free / memory.total,
        )

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _supported(self, ask: Any, *arguments: Any) -> Any:
        """``None`` where this GPU does not know."""
        try:
            return ask(self._handle, *arguments)
        except self._nvml.NVMLError_NotSupported:
            return None
