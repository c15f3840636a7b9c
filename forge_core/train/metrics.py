"""Metrics of steps: kept on the device, fetched one step late, and only when they are logged."""

from __future__ import annotations

import time
from collections.abc import Mapping

import attrs
import torch

from forge_core.contracts.gpu import PEAK_BF16_TFLOPS


@attrs.define
class Pending:
    """Values of a logged step on their way to the host."""

    step: int
    names: tuple[str, ...]
    values: torch.Tensor
    copied: torch.cuda.Event | None
    known: Mapping[str, float]


class Measurement:
    """What is measured between two logged steps."""

    def __init__(self, device: torch.device, flops_per_token: float, peak_flops: float | None, ranks: int) -> None:
        self._device = device
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._ranks = ranks
        self._pending: Pending | None = None
        self.restart(0.0)

    def restart(self, waited: float) -> None:
        """Measure from here: after what is not training (evaluation, saving).

        ``waited``: seconds spent waiting for data since the start of the run.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # so that what was queued before is not measured; not on every step
        self._start_window(waited)

    def _start_window(self, waited: float) -> None:
        self._since = time.perf_counter()
        self._waited_before = waited
        self._steps = 0
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """One more step of ``tokens`` tokens over all ranks."""
        self._steps += 1
        self._tokens += tokens

    def submit(self, step: int, tensors: Mapping[str, torch.Tensor], known: Mapping[str, float], waited: float) -> None:
        """Start to copy device scalars to the host, together with what the host knows already.

        ``waited``: seconds spent waiting for data since the start of the run.
        """
        seconds = (time.perf_counter() - self._since) / self._steps
        per_second = self._tokens / self._steps / seconds
        values = {**known, "tokens_per_second": per_second, "step_seconds": seconds}
        values["data_seconds"] = (waited - self._waited_before) / self._steps
        if self._peak_flops is not None:
            values["mfu"] = per_second * self._flops_per_token / (self._peak_flops * self._ranks)
        if self._device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        stacked = torch.stack([tensor.detach().to(torch.float64) for tensor in tensors.values()])
        copied = None
        if self._device.type == "cuda":
            stacked = torch.empty_like(stacked, device="cpu", pin_memory=True).copy_(stacked, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            copied.record()
        self._pending = Pending(step, tuple(tensors), stacked, copied, values)
        self._start_window(waited)

    def fetch(self) -> dict[str, float] | None:
        """The values of the last logged step, once. The only place where the host waits for the device."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        if pending.copied is not None:
            pending.copied.synchronize()
        fetched = dict(zip(pending.names, pending.values.tolist(), strict=True))
        return {"step": pending.step, **fetched, **pending.known}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of ``device`` in bf16, or ``None`` where no data sheet says so."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_BF16_TFLOPS if key in name]
    return PEAK_BF16_TFLOPS[max(known, key=len)] * 1e12 if known else None
