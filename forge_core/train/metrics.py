"""Metrics of steps: kept on the device, fetched one step late, and only when they are logged."""

from __future__ import annotations

import time
from collections.abc import Mapping

import attrs
import torch

from forge_core.contracts.gpu import PEAK_BF16_TFLOPS
from forge_core.distributed.mesh import LOSS_AXES, Mesh
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.train.step_modules import StepModules


@attrs.define
class Pending:
    """Values of a logged step on their way to the host."""

    step: int
    names: tuple[str, ...]
    values: torch.Tensor
    copied: torch.cuda.Event | None
    known: Mapping[str, float]


class Metrics:
    """Times and counts between two logged steps."""

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


class StepMetrics:
    """The values of a step that is logged, over all ranks, handed to ``Metrics``."""

    def __init__(self, measurement: Metrics, mesh: Mesh, device: torch.device, modules: StepModules) -> None:
        self._measurement = measurement
        self._mesh = mesh
        self._device = device
        self._modules = modules
        # of all pipeline stages, asked for once, at the first step that is logged
        self._auxiliary_names: list[str] | None = None

    def submit(
        self,
        step: int,
        values: dict[str, torch.Tensor],
        skipped: torch.Tensor,
        known: Mapping[str, float],
        waited: float,
    ) -> None:
        """Sum over ranks what is a part of a sum.

        Args:
            values: ``loss``, this rank's part, which is replaced by the whole; norms, equal on all ranks.
            skipped: updates left out so far.
            known: values that the host has already.
            waited: as ``Metrics.submit``.
        """
        auxiliary = {f"auxiliary/{name}": value for name, value in self._auxiliary_means().items()}
        if auxiliary and self._mesh.degrees["tp"] > 1:
            whole = self._mesh.sum_over(torch.stack([*auxiliary.values()]), ("tp",))
            auxiliary = dict(zip(auxiliary, whole.unbind(), strict=True))
        over_ranks = torch.stack([values["loss"], *auxiliary.values()])
        loss, *means = self._mesh.sum_over(over_ranks, LOSS_AXES).unbind()
        values["loss"] = loss
        norms = {name: value for name, value in values.items() if name.partition("/")[0] == "grad_norm"}
        tensors = {"loss": loss, **norms, **dict(zip(auxiliary, means, strict=True))}
        tensors |= self._modules.metrics(self._device)
        self._measurement.submit(step, tensors | {"skipped": skipped}, known, waited)

    def _auxiliary_means(self) -> Mapping[str, torch.Tensor]:
        """By the same names on every rank: a stage without the layers that have a loss has zero of it."""
        means = LEDGER.means()
        if self._mesh.degrees["pp"] == 1:
            return means
        if self._auxiliary_names is None:
            stages = self._mesh.gather_over("pp", [*means])
            self._auxiliary_names = list(dict.fromkeys(name for stage in stages for name in stage))
        nothing = torch.zeros((), device=self._device)
        return {name: means.get(name, nothing) for name in self._auxiliary_names}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of ``device`` in bf16, or ``None`` where no data sheet says so."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_BF16_TFLOPS if key in name]
    return PEAK_BF16_TFLOPS[max(known, key=len)] * 1e12 if known else None
