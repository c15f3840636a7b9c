"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.checkpoint.retention import is_due
from forge_core.checkpoint.state_dict import named_parameters
from forge_core.config.sections import Job
from forge_core.contracts.callback import RunContext, StepContext
from forge_core.contracts.executor import Executor
from forge_core.contracts.replication import LiveState
from forge_core.contracts.scheduler import Schedule
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.distributed.consensus import Consensus
from forge_core.distributed.mesh import Mesh
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.train.component_checks import CheckedLoss
from forge_core.train.evaluation import Evaluation
from forge_core.train.events import Events
from forge_core.train.first_steps import FirstSave, FirstSteps
from forge_core.train.gradients import Gradients
from forge_core.train.metrics import Metrics, StepMetrics
from forge_core.train.replication import Replicas
from forge_core.train.rollback import Rollback
from forge_core.train.saving import Saving
from forge_core.train.scales import step_scales, to_device
from forge_core.train.state_transfer import StateTransfer
from forge_core.train.step_guard import StepGuard, can_skip_on_device
from forge_core.train.step_modules import StepModules


@attrs.define(slots=False)
class Trainer:
    """One run in progress. ``step`` and ``loader.position`` say where it is."""

    job: Job
    mesh: Mesh
    device: torch.device
    parts: Sequence[nn.Module]
    executor: Executor
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loader: BatchLoader
    evaluation: Evaluation | None
    measurement: Metrics
    lifecycle: Events
    context: RunContext
    saving: Saving
    anomalies: StepGuard
    rollback: Rollback
    loss: CheckedLoss
    record: Callable[[Mapping[str, float]], None]
    """Takes the values of a logged step or of an evaluation."""
    optimizer_words: str
    """Names it in messages."""
    step: int = 0
    is_resumed: bool = False
    """From a checkpoint, which may be one of step 0."""
    accumulation_asked_for: int = 1
    """``train.grad_accumulation``, whatever the ranks have made of it; the next start looks whether it is as before."""
    replicas: Replicas = attrs.field(factory=Replicas)
    live_parts: StateTransfer | None = None
    """What another replica is given; needed if there may be others."""

    def __attrs_post_init__(self) -> None:
        job = self.job
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._parameters = named_parameters(self.parts)
        self._step_modules = StepModules(self.parts, self.mesh)
        self._skips_on_device = can_skip_on_device(self.optimizer, self.device)
        self._first_steps = FirstSteps(self._parameters, self.loss, self.optimizer_words)
        self._first_save = FirstSave(self.optimizer, self.optimizer_words, self._parameters, self.context.log)
        self._consensus = Consensus()
        self._step_metrics = StepMetrics(self.measurement, self.mesh, self.device, self._step_modules)
        self._last_save = time.monotonic()
        self._may_skip = self.lifecycle.listens("before_optimizer_step")
        self._put_off_save = False
        self._tokens_a_step = (
            job.train.batch_size * (job.train.grad_accumulation or 1) * self.mesh.dp_size * job.train.seq_len
        )

    def run(self) -> str:
        """Train to the last step. Returns why the run was stopped early, saved as well; nothing if it was not.

        Raises:
            NonFiniteError: too many updates had to be left out.
        """
        job, last = self.job, self.job.train.steps
        self._set_training(True)
        self.lifecycle.call("run_start", run=self.context)
        if not self.is_resumed and is_due(0, job.checkpoint):
            self._save()
        self.replicas.join(self.step, self._give_state, self._take_state)
        self.measurement.restart(self.loader.seconds_waiting)
        for microbatches in self._microbatches_of_steps():
            before = self.step
            self.step += 1
            self._train_step(microbatches)
            if self.step == before:
                continue  # it did not count
            evaluated = self._evaluate_if_due()
            self._ask_for_timely_save()
            save, stop, is_writing = self._consensus.exchange(self.context.requests, is_writing=self.saving.is_writing)
            self.saving.look(self.step, is_written=not is_writing)
            if save or stop or self.step == last or self._is_checkpoint_due() or self._put_off_save:
                self._save(evaluated, is_last=stop or self.step == last)
            if self.anomalies.to_leave_out is not None:
                self._roll_back()
            elif stop or self.step == last:
                break
        self._consensus.finish()
        self._log_pending()
        self.saving.finish(must_succeed=True)
        stopped = self._consensus.reason(self.context.requests) if self.step < last else ""
        self.lifecycle.call("run_end", run=self.context, step=self.step, stopped=stopped)
        return stopped

    def _evaluate_if_due(self) -> Mapping[str, float]:
        """Nothing if it is not due, or given up as the run is to stop."""
        if self.evaluation is None or not self._is_due(self.job.eval.interval):
            return {}
        self._log_pending()
        values = self.evaluation.run(lambda: self._consensus.any_rank(bool(self.context.requests.stop)))
        if values:
            self.record({"step": self.step, **values})
            self.lifecycle.call("eval_end", run=self.context, step=self.step, metrics=values)
            self.measurement.restart(self.loader.seconds_waiting)
        return values

    def _microbatches_of_steps(self) -> Iterator[Sequence[Mapping[str, torch.Tensor]]]:
        while True:
            if not self.replicas.is_alone:
                self._log_pending()
                self.anomalies.look()  # while everything still is as it was in that step; the host has waited for it
                self.replicas.begin_step(self.step)
            yield next(self.loader)

    def _train_step(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Does nothing, and takes ``step`` back, if other replicas say that it does not count."""
        step = self.step
        self.lifecycle.call("step_start", run=self.context, step=step)
        self._seed_generators()

        scales = step_scales(microbatches, self.parts[0], self.mesh, self.device, self.replicas)
        LEDGER.start_step(scales.targets, self.mesh.degrees["tp"], scales.own, scales.tokens)
        batches = [to_device(batch, self.device) for batch in microbatches]
        self._first_steps.before_gradients()
        total = self.executor.run(batches, scales.targets)
        self._first_steps.after_gradients(step)
        loss = self._sum_over_replicas(total) * scales.targets

        gradients, logged = Gradients(self._parameters, self.mesh, self.device), self._is_logged()
        metrics = {"loss": loss, "grad_norm": gradients.norm}
        if logged:
            norms = gradients.norms_along(self.job.metrics.grad_norm_per)
            metrics |= {f"grad_norm/{name}": norm for name, norm in norms.items()}
        context = StepContext(step, self._tokens_so_far, metrics, logged)
        verdict = self.anomalies.judge(step, total, gradients, batches)
        self.lifecycle.call("before_optimizer_step", run=self.context, context=context)
        rate = self._set_learning_rates()
        self.saving.wait_until_copied()
        skip = self._skip_asked(verdict)
        if not self.replicas.commit(step):
            self._take_back_step()
            return
        self.measurement.count(self._tokens_a_step)
        self.anomalies.count_step()
        if skip:
            self._step_modules.forget()
        else:
            self._update(gradients, verdict)
        self.optimizer.zero_grad(set_to_none=True)
        self._log_pending()
        if self.anomalies.is_overdue:
            self.anomalies.look()
        if logged:
            known = {"lr": rate, "tokens": self._tokens_so_far}
            self._step_metrics.submit(step, metrics, self.anomalies.skipped, known, self.loader.seconds_waiting)
        self.lifecycle.call("step_end", run=self.context, context=context)

    def _sum_over_replicas(self, total: torch.Tensor) -> torch.Tensor:
        """The gradients, what modules have accumulated, and this rank's loss; returns the last."""
        if self.replicas.is_alone:
            return total
        together = total.clone()
        others = [*self._step_modules.accumulators(), *LEDGER.sums(), together]
        self.replicas.sum_step(self._parameters, others)
        return together

    def _update(self, gradients: Gradients, verdict: torch.Tensor) -> None:
        left_out = verdict if self._skips_on_device else None
        self._step_modules.before_optimizer_step(self.step / self.job.train.steps, left_out)
        gradients.clip(self.job.train.clip_norm)
        self.optimizer.found_inf = left_out  # type: ignore[attr-defined]  # torch's
        self.optimizer.step()
        self._first_save.note_update(gradients.named)

    def _take_back_step(self) -> None:
        self._step_modules.forget()
        self.optimizer.zero_grad(set_to_none=True)
        self.loader.restart(self.loader.stream, self.loader.position - self.loader.samples_per_step)
        self.step -= 1

    def _set_training(self, training: bool) -> None:
        for part in self.parts:
            part.train(training)

    def _seed_generators(self) -> None:
        """Whatever draws random numbers in a step draws the same ones after a resume, with nothing to save; and others
        on ranks, of all replicas, that have other samples, positions or layers."""
        place = self.replicas.share.index * self.mesh.world_size + self.mesh.noise_rank
        seed = (self.job.train.seed * 1_000_003 + self.step * 8_191 + place) % 2**63
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend there is, for 80 µs
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)

    @property
    def _tokens_so_far(self) -> int:
        return self.loader.position * self.job.train.seq_len

    def _set_learning_rates(self) -> float:
        """Returns the rate of the first group, the one that is logged."""
        multiplier = self.schedule(self.step)
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * multiplier
        return self._base_rates[0] * multiplier

    def _skip_asked(self, verdict: torch.Tensor) -> bool:
        """By a callback; or by the verdict, where the host has to be told."""
        if not self._skips_on_device and verdict.item():
            skip = True
        elif self._may_skip:
            skip = self._consensus.any_rank(self.context.requests.skip_step)
            if not self.replicas.is_alone:
                skip = bool(self.replicas.any_replica(torch.full((), float(skip), device=self.device)).item())
        else:
            skip = False
        self.context.requests.skip_step = False
        return skip

    def _is_logged(self) -> bool:
        return self.step == 1 or self._is_due(self.job.metrics.interval, at_end=True)

    def _is_due(self, interval: int, *, at_end: bool = False) -> bool:
        """Every ``interval`` steps and at the last step; an interval of 0 is never due, except at the end if asked."""
        at_last = self.step == self.job.train.steps
        return (interval > 0 and (self.step % interval == 0 or at_last)) or (at_end and at_last)

    def _is_checkpoint_due(self) -> bool:
        """Of replicas, the first one writes what all of them have."""
        return self.replicas.share.index == 0 and is_due(self.step, self.job.checkpoint)

    def _log_pending(self) -> None:
        values = self.measurement.fetch()
        if values is None:
            return
        values["skipped"] = int(values["skipped"])
        self.record(values)
        if self.mesh.rank == 0:
            self.lifecycle.call("step_logged", run=self.context, step=int(values["step"]), metrics=values)
        self.anomalies.learn(values["skipped"], int(values["step"]))

    def _ask_for_timely_save(self) -> None:
        """By rank 0's clock."""
        minutes = self.job.checkpoint.minutes
        if (
            minutes > 0
            and self.mesh.rank == 0
            and self.replicas.share.index == 0
            and time.monotonic() - self._last_save >= 60 * minutes
        ):
            self.context.requests.save_now = True

    def _save(self, evaluated: Mapping[str, float] = MappingProxyType({}), *, is_last: bool = False) -> None:
        """Unless the run has to go back; and if another one will follow, not before a step has been a good one: the
        newest checkpoint is then one from before what may be wrong."""
        self._log_pending()
        self.anomalies.look()
        self._put_off_save = not is_last and self.anomalies.in_a_row > 0
        if self._put_off_save or self.anomalies.to_leave_out is not None:
            return
        if not self.anomalies.parameters_are_finite([*self._parameters.values()], self.step):
            return
        self._first_save.check()
        self.saving.begin(self.step, self._tokens_so_far, self._progress(), evaluated, must_succeed=is_last)
        self._last_save = time.monotonic()
        self.measurement.restart(self.loader.seconds_waiting)

    def _progress(self) -> dict[str, Any]:
        return {
            "position": self.loader.position,
            "left_out": self.loader.stream.left_out,
            "anomalies": self.anomalies.state(),
            "rolling_back": self.rollback.state(),
            "accumulation_asked_for": self.accumulation_asked_for,
        }

    def _give_state(self) -> LiveState:
        assert self.live_parts is not None, "others may come"
        return self.live_parts.give({"step": self.step, **self._progress()})

    def _take_state(self, state: LiveState) -> int:
        assert self.live_parts is not None, "there are others"
        self.saving.finish()  # what is being saved must not change
        progress = self.live_parts.take(state)
        self.step = progress["step"]
        stream = self.loader.stream
        left_out = [(start, stop) for start, stop in progress["left_out"]]
        self.loader.restart(SampleStream(stream.source, stream.seed, stream.shuffle, left_out), progress["position"])
        self.anomalies.restart(progress["anomalies"])
        self._put_off_save = False
        return self.step

    def _roll_back(self) -> None:
        """To the checkpoint from before the steps that are to be left out."""
        self._log_pending()
        self.anomalies.look()
        stretch = self.anomalies.to_leave_out
        assert stretch is not None, "it is what the run goes back for"
        self.saving.finish()
        self.step = self.rollback.go(stretch, self.step)
        self._put_off_save = False
        self.measurement.restart(self.loader.seconds_waiting)
