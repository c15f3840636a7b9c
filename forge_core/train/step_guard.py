"""Steps whose update would do harm: a loss, a gradient or an input is not finite, or the gradient is far too large.

Whether a step is one is found on the device and agreed by all ranks, and its update is left out. The host learns of it
when it waits for the device anyway: at logged steps, before saving, and after ``_SYNC_AFTER`` steps at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from forge_core.checkpoint.contents import SampleRange
from forge_core.contracts.observer import Origin
from forge_core.distributed.collective_errors import gather
from forge_core.errors import and_more
from forge_core.train.gradients import Gradients, Squares, all_finite
from forge_core.train.run import Run
from forge_core.train.scales import LossScale

_SYNC_AFTER = 100
"""Steps. What is kept of each is small, and one wait in so many steps costs nothing."""
_LISTED = 8
"""Names and ranks in an event; of more, the number is given."""
_SAID = 3
"""The same in a line."""


@attrs.frozen
class _Checked:
    """A step as it is kept until the host syncs: host values, and tensors on the device."""

    step: int
    start: int
    stop: int
    verdict: torch.Tensor
    is_own: torch.Tensor
    """The verdict of this replica, if there are others."""
    left_out: torch.Tensor
    """The verdict, or that only the loss scale has made gradients overflow."""
    loss: torch.Tensor
    norm: torch.Tensor
    names: Sequence[str]
    squares: Iterable[Squares]
    inputs: Mapping[str, torch.Tensor]


@attrs.frozen
class _Found:
    """The findings of one rank in a step."""

    rank: int
    loss: bool
    inputs: Sequence[str]
    gradients: Sequence[str]
    numbers: Sequence[int]
    """Positions of this rank's samples in the data."""

    def facts(self) -> dict[str, Any]:
        """Return what an event has of it."""
        facts = {"rank": self.rank, "loss": self.loss, "inputs": self.inputs}
        return {**facts, "gradients": self.gradients[:_LISTED], "n_gradients": len(self.gradients)}


class StepGuard:
    """All ranks call the same methods at the same steps.

    Args:
        saved: what ``state`` returned when a checkpoint was written.
        any_replica: returns whether a flag on the device is 1 in any replica.
        examine: looks for the module at fault in the step that starts at a position.
    """

    origin: Origin | None = None
    """The first finding after this start."""
    to_leave_out: SampleRange | None
    """Set once there have been ``roll_back_after`` such steps in a row: the run must go back."""

    def __init__(
        self,
        run: Run,
        saved: Mapping[str, Any] | None = None,
        any_replica: Callable[[torch.Tensor], torch.Tensor] = lambda flag: flag,
        examine: Callable[[int], Origin | None] = lambda start: None,
    ) -> None:
        self._run = run
        self._section = run.job.anomalies
        self._any_replica = any_replica
        self._examine = examine
        self._has_examined = False
        self.loss_scale = LossScale(run.job.train.precision, run.device)
        self.restart(saved)

    def restart(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from what was known when a checkpoint was written, or from nothing."""
        saved = saved or {"skipped": 0, "row": None, "mean_norm": [0.0, 0.0]}
        self.loss_scale.restart(saved)
        self._known = int(saved["skipped"])
        self._row = None if saved["row"] is None else SampleRange(**saved["row"])
        self._checked: list[_Checked] = []
        self.to_leave_out = None
        self.skipped = torch.full((), float(self._known), device=self._run.device)
        self._mean, self._seen = (torch.full((), value, device=self._run.device) for value in saved["mean_norm"])

    def state(self) -> dict[str, Any]:
        """State that decides the future, as JSON values. ``sync`` first."""
        return {
            "skipped": self._known,
            "row": None if self._row is None else attrs.asdict(self._row),
            "mean_norm": torch.stack([self._mean, self._seen]).tolist(),
            **self.loss_scale.state(),
        }

    @property
    def has_failed(self) -> bool:
        """Return whether the run must go back."""
        return self.to_leave_out is not None

    @property
    def in_a_row(self) -> int:
        """Such steps, the last one included, as far as the host knows."""
        return self._row.steps if self._row else 0

    def check(
        self, step: int, loss: torch.Tensor, gradients: Gradients, batches: Iterable[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """Return whether to leave out the update of this step. The host does not wait. ``count`` makes it count.

        Gradients that only the loss scale has made overflow are left out as well, and are no fault of the step.

        Args:
            loss: this rank's, a scalar.
            gradients: this rank's.
            batches: this rank's microbatches; their entries that are floating point have to be finite.

        Returns:
            1 or 0, fp32 on the device, the same on all ranks of all replicas.
        """
        inputs = _finite_inputs(batches)
        norm, overflow = self.loss_scale.find_overflow(gradients.norm)
        health = norm.mul(0).add_(loss, alpha=0)  # 0, or NaN if one of them is not finite
        for finite in inputs.values():
            health = torch.where(finite, health, math.nan)
        verdict = health != health
        if self._section.spike_factor > 0:
            known = self._seen >= self._section.spike_window
            verdict |= known & (norm > self._section.spike_factor * self._mean)
        own = self._run.consensus.reduce(verdict.float())
        verdict = self._any_replica(own)
        stop = self._run.loader.position
        start = stop - self._run.loader.samples_per_step
        names, squares = [*gradients.named], gradients.squares.values()
        left_out = verdict if overflow is None else torch.maximum(verdict, overflow)
        self._latest = _Checked(step, start, stop, verdict, own, left_out, loss, norm, names, squares, inputs)
        return left_out

    def count(self) -> None:
        """The step that was checked last counts, with or without its update."""
        latest = self._latest
        self.skipped.add_(latest.verdict)
        if self._section.spike_factor > 0:
            self._follow(latest.norm, latest.left_out)
        self.loss_scale.update(latest.verdict, latest.left_out)
        self._checked.append(latest)

    def learn(self, skipped: float, step: int) -> None:
        """Take note of what has come with the metrics of a step.

        Args:
            skipped: updates left out until then.
        """
        if skipped != self._known:
            self.sync()
            return
        later = [checked for checked in self._checked if checked.step > step]
        if len(later) < len(self._checked):
            self._row = None
        self._checked = later

    def sync_if_overdue(self) -> None:
        """So that not too much is kept."""
        if len(self._checked) >= _SYNC_AFTER:
            self.sync()

    def sync(self) -> None:
        """Wait for the device, and tell of every update that has been left out."""
        checked, self._checked = self._checked, []
        if not checked:
            return
        for one, verdict in zip(checked, torch.stack([one.verdict for one in checked]).tolist(), strict=True):
            if not verdict:
                self._row = None
                continue
            self._known += 1
            before = self._row or SampleRange(one.step, one.start, one.start, 0)
            self._row = attrs.evolve(before, stop=one.stop, steps=before.steps + 1)
            self._tell(one)
            is_first = self.to_leave_out is None or self.to_leave_out.first_step == self._row.first_step
            if is_first and self._row.steps >= self._section.roll_back_after:
                self.to_leave_out = self._row

    def parameters_are_finite(self, parameters: Sequence[torch.Tensor], step: int) -> bool:
        """Return whether all parameters are finite, before they are saved. The host waits for it.

        If one is not, the update of ``step``, the last one, has made it so, since a step that begins with such
        parameters is left out; the run must go back.
        """
        is_wrong = not all_finite(parameters, self._run.device).item()
        if not self._run.consensus.any_rank(is_wrong):
            return True
        self._run.log(f"step {step}: its update has made parameters that are not finite; they are not saved")
        position = self._run.loader.position
        self.to_leave_out = SampleRange(step, position - self._run.loader.samples_per_step, position, 1)
        return False

    def _follow(self, norm: torch.Tensor, verdict: torch.Tensor) -> None:
        """The mean of the norms of good steps: over all of them at first, later over about a window."""
        good = verdict == 0
        self._seen.add_(good)
        share = (1 / self._seen.clamp(min=1)).clamp(min=1 / self._section.spike_window)
        self._mean = torch.where(good, self._mean + (norm - self._mean) * share, self._mean)

    def _tell(self, checked: _Checked) -> None:
        found = [one for one in gather(self._find(checked)) if one.loss or one.inputs or one.gradients]
        numbers = sorted({index for one in found if one.loss or one.inputs for index in one.numbers})
        if not numbers:  # a gradient is the sum over all of them
            numbers = self._run.loader.stream.numbers(np.arange(checked.start, checked.stop)).tolist()
        ranges = _ranges_of(numbers)
        reason, what = "not finite", f"{_described(found)} not finite" if found else ""
        if not found and checked.is_own.item():
            reason, what = "spike", "the norm of the gradient is a spike"
        elif not found:
            what = "an input of another replica is not finite"
        spans = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
        self._run.log(f"step {checked.step}: {what}; its update is left out (samples {_listed(spans)})")
        if (origin := self._origin_of(checked, found)) is not None:
            self._run.log(f"step {checked.step}: the first output that is not finite is that of {origin}")
        self._run.directory.write_event(
            "skipped",
            step=checked.step,
            reason=reason,
            ranks=len(found),
            found=[one.facts() for one in found[:_LISTED]],
            samples=ranges,
            origin=None if origin is None else attrs.asdict(origin),
        )

    def _origin_of(self, checked: _Checked, found: Sequence[_Found]) -> Origin | None:
        """Looked for once, as it costs a forward, and not where the data is at fault."""
        if self._has_examined or not found or any(one.inputs for one in found):
            return None
        self._has_examined = True
        self.origin = self._examine(checked.start)
        return self.origin

    def _find(self, checked: _Checked) -> _Found:
        """On this rank."""
        bad = []
        for squares in checked.squares:
            finite = squares.each.isfinite().tolist()
            bad += [index for index, is_finite in zip(squares.indices, finite, strict=True) if not is_finite]
        return _Found(
            rank=self._run.mesh.rank,
            loss=not checked.loss.isfinite().item(),
            inputs=[name for name, finite in checked.inputs.items() if not finite.item()],
            gradients=[checked.names[index] for index in sorted(bad)],
            numbers=self._run.loader.numbers_of_step(checked.start),
        )


def can_skip_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer's step does nothing where ``left_out`` is 1, so that the host need not know.

    Some say so by ``leaves_out``. Those of torch do it in their fused implementations, where ``found_inf`` is 1, and
    say so as they do to ``torch.amp.GradScaler``: parameters, moments and counts of steps stay as they are. Only SGD
    makes its momentum in the first step without filling it. To parameters kept elsewhere the verdict would have to
    travel.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    is_fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    is_able = is_fused and not isinstance(optimizer, torch.optim.SGD) and device.type in ("cpu", "cuda")
    return (is_able or getattr(optimizer, "leaves_out", False)) and all(one.device == device for one in parameters)


def _finite_inputs(batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Flags on the device, by name: a floating-point input is finite."""
    finite: dict[str, torch.Tensor] = {}
    for batch in batches:
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                whole = tensor.isfinite().all()
                finite[name] = finite[name] & whole if name in finite else whole
    return finite


def _ranges_of(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending positions as ranges ``[first, last]``."""
    stretches = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return [[int(one[0]), int(one[-1])] for one in stretches]


def _described(found: Sequence[_Found]) -> str:
    """Say which values are not finite, with a verb."""
    parts = []
    if any(one.loss for one in found):
        parts.append("the loss")
    if inputs := sorted({name for one in found for name in one.inputs}):
        parts.append(f"the input {_listed(inputs)}")
    if gradients := list(dict.fromkeys(name for one in found for name in one.gradients)):
        parts.append(f"the gradient of {_listed(gradients)}")
    ranks = [str(one.rank) for one in found]
    where = f" on rank{'s' * (len(ranks) > 1)} {_listed(ranks)}" if dist.get_world_size() > 1 else ""
    return f"{' and '.join(parts)}{where} {'is' if len(parts) == 1 else 'are'}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SAID]) + and_more(len(names), _SAID)
