"""Metrics of steps: kept on the device, fetched one step late, and only when they are logged."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import attrs
import torch

from forge_core.contracts.batch import MixedSource
from forge_core.contracts.callback import StepContext
from forge_core.contracts.gpu import PEAK_BF16_TFLOPS
from forge_core.distributed.host_copy import HostCopy
from forge_core.distributed.mesh import LOSS_AXES, StageScalars, widest
from forge_core.errors import PluginError
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.train.build import BuiltModel
from forge_core.train.executor import Batch
from forge_core.train.run import Run
from forge_core.train.step_guard import StepGuard
from forge_core.train.step_modules import StepModules


@attrs.define
class Pending:
    """Values of a logged step on their way to the host."""

    step: int
    names: tuple[str, ...]
    values: HostCopy
    known: Mapping[str, float]


class Metrics:
    """Values of logged steps, and the times and counts between them.

    Args:
        model: its FLOPs, and its loss, which adds up those of sources.
        modules: report values of their own.
        guard: learns from logged values that updates were left out.
    """

    def __init__(self, run: Run, model: BuiltModel, modules: StepModules, guard: StepGuard) -> None:
        train = run.job.train
        self._run = run
        self._model = model
        source = run.loader.stream.source
        self._source_names = tuple(source.names) if isinstance(source, MixedSource) else ()
        self._peak_flops = peak_flops(run.device)
        self._modules = modules
        self._guard = guard
        self._flops_beside = getattr(model.parts[0], "flops_beside", lambda batch: 0.0)
        self._tokens_a_step = train.batch_size * (train.grad_accumulation or 1) * run.mesh.dp_size * train.seq_len
        self._ready: tuple[int, dict[str, torch.Tensor], dict[str, float]] | None = None
        self._pending: Pending | None = None
        self._auxiliary = StageScalars("auxiliary losses")
        self._start_window()

    def restart(self) -> None:
        """Measure from here: after what is not training (evaluation, saving)."""
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)  # so that what was queued before is not measured
        self._start_window()

    def _start_window(self) -> None:
        self._since = time.perf_counter()
        self._waited_before = self._run.loader.seconds_waiting
        self._steps, self._beside = 0, 0.0

    def is_logged(self, step: int) -> bool:
        """Return whether the values of ``step`` are logged: of the first and the last step in any case."""
        return step in (1, self._run.job.train.steps) or self._run.is_due(step, self._run.job.metrics.interval)

    def begin(self, step: int) -> None:
        """Have the loss of ``step`` added up by source, if it is logged and there are several."""
        logs = bool(self._source_names) and self.is_logged(step)
        self._model.loss.sums_of_sources = zeros_of_sources(len(self._source_names), self._run.device) if logs else None

    def sums_of_sources(self) -> list[torch.Tensor]:
        """The losses and targets of each source in this step, of this rank; nothing if they are not logged."""
        sums = self._model.loss.sums_of_sources
        return [] if sums is None else [sums]

    def count(self, microbatches: Sequence[Batch]) -> None:
        """Count one more step, of which this rank had these, in the host's memory."""
        self._steps += 1
        self._beside += sum(map(self._flops_beside, microbatches))

    def submit(self, context: StepContext, rate: float, targets: torch.Tensor) -> torch.Tensor:
        """Take the values of a step, which ``send`` sends.

        Args:
            context: its ``metrics`` have ``loss``, this rank's part of it, and norms, equal on all ranks.
            rate: the learning rate that is logged.
            targets: of all ranks, or the sum of their weights.

        Returns:
            The loss of all ranks.
        """
        mesh, values = self._run.mesh, context.metrics
        means = self._auxiliary.aligned(mesh, LEDGER.means(), self._run.device)
        auxiliary = {f"auxiliary/{name}": value for name, value in means.items()}
        if auxiliary and mesh.degrees["tp"] > 1:
            whole = mesh.sum_over(torch.stack([*auxiliary.values()]), ("tp",))
            auxiliary = dict(zip(auxiliary, whole.unbind(), strict=True))
        sums = [one for each in self.sums_of_sources() for one in each.to(values["loss"].dtype).flatten().unbind()]
        over_ranks = torch.stack([values["loss"], *auxiliary.values(), *sums])
        loss, *summed = mesh.sum_over(over_ranks, LOSS_AXES).unbind()
        norms = {name: value for name, value in values.items() if name.partition("/")[0] == "grad_norm"}
        tensors = {"loss": loss, "targets": targets, **norms, **dict(zip(auxiliary, summed, strict=False))}
        tensors |= self._modules.metrics(self._run.device)
        tensors |= losses_of_sources(self._source_names, summed[len(auxiliary) :])
        known = {"lr": rate, "tokens": context.tokens, **self._tokens_of_sources(), **self._speed()}
        self._ready = context.step, tensors | {"skipped": self._guard.skipped} | self._guard.loss_scale.metrics(), known
        self._start_window()
        return loss

    def send(self) -> None:
        """Start to copy the values of a logged step to the host, with what callbacks have reported of it.

        Raises:
            PluginError: a callback has reported what the step has itself.
        """
        if self._ready is None:
            return
        (step, tensors, known), self._ready = self._ready, None
        reported = self._run.reports.take(self._run.mesh, self._run.device)
        if taken := reported.keys() & (tensors.keys() | known.keys() | {"step"}):
            raise PluginError(f"a callback reports {sorted(taken)[0]!r}, which the step has itself; take another name")
        tensors |= reported
        stacked = torch.stack([tensor.detach().to(widest(self._run.device)) for tensor in tensors.values()])
        self._pending = Pending(step, tuple(tensors), HostCopy(stacked), known)

    def _tokens_of_sources(self) -> dict[str, int]:
        counts = self._run.loader.stream.counts(self._run.loader.position)
        return {f"tokens/{name}": count * self._run.job.train.seq_len for name, count in counts.items()}

    def _speed(self) -> dict[str, float]:
        """Since the last logged step, or ``restart``."""
        seconds = (time.perf_counter() - self._since) / self._steps
        values = {"tokens_per_second": self._tokens_a_step / seconds, "step_seconds": seconds}
        values["data_seconds"] = (self._run.loader.seconds_waiting - self._waited_before) / self._steps
        if self._peak_flops is not None:
            beside = self._beside * self._run.mesh.dp_size / self._steps  # as if other ranks had as many
            flops = self._tokens_a_step * self._model.flops_per_token + beside
            values["mfu"] = flops / (seconds * self._peak_flops * self._run.mesh.world_size)
        if self._run.device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._run.device) / 2**30
        return values

    def fetch(self) -> dict[str, float] | None:
        """The values of the last logged step, once. The host waits for the device here, and in the guard."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        fetched = dict(zip(pending.names, pending.values.values(), strict=True))
        fetched = {name: value for name, value in fetched.items() if value != ABSENT or not name.startswith("loss/")}
        return {"step": pending.step, **fetched, **pending.known}

    def log_pending(self) -> None:
        """Log the last step that is to be logged, if it has not been."""
        if (values := self.fetch()) is None:
            return
        counts = values.keys() & {"skipped", "targets", "overflows"}
        values |= {name: int(values[name]) for name in counts if values[name].is_integer()}
        self._run.record(values)
        if self._run.mesh.rank == 0:
            self._run.emit("step_logged", step=int(values["step"]), metrics=values)
        self._guard.learn(values["skipped"], int(values["step"]))

    def sync(self) -> None:
        """Log what is pending, and let the guard look at all steps so far. The host waits for the device."""
        self.log_pending()
        self._guard.sync()


ABSENT = -math.inf
"""In place of a mean over nothing, which is not logged."""


def zeros_of_sources(number: int, device: torch.device) -> torch.Tensor:
    """``CheckedLoss.sums_of_sources`` before the first microbatch."""
    return torch.zeros(number, 2, dtype=widest(device), device=device)


def losses_of_sources(names: Sequence[str], sums: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """``loss/<source>``, from sums and counts in turn, those of all ranks; ``ABSENT`` where there are none."""
    pairs = zip(names, sums[::2], sums[1::2], strict=True) if sums else ()
    return {f"loss/{name}": torch.where(count > 0, total / count, ABSENT) for name, total, count in pairs}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of ``device`` in bf16, or ``None`` where no data sheet says so."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_BF16_TFLOPS if key in name]
    return PEAK_BF16_TFLOPS[max(known, key=len)] * 1e12 if known else None
