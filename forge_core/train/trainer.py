"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from forge_core.checkpoint.retention import is_due
from forge_core.checkpoint.state_dict import named_parameters
from forge_core.config.sections import Job
from forge_core.contracts.callback import RunContext, StepContext
from forge_core.contracts.executor import Executor
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.replication import LiveState
from forge_core.contracts.scheduler import Schedule
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.distributed.consensus import Agreement
from forge_core.distributed.mesh import DATA_AXES, LOSS_AXES, Mesh
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.train.events import Lifecycle
from forge_core.train.executor import Batch
from forge_core.train.first_steps import FirstSave, FirstSteps
from forge_core.train.gradients import Layout, Squares, clip_gradients, global_norm, norms_along, squared_norms
from forge_core.train.loss_check import CheckedLoss
from forge_core.train.metrics import Measurement
from forge_core.train.replication import Replicas
from forge_core.train.rollback import RollingBack
from forge_core.train.saving import Saving
from forge_core.train.state_transfer import LiveParts
from forge_core.train.step_guard import Anomalies, can_skip_on_device
from forge_core.train.step_modules import Contributors


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
    evaluation: Callable[[], Iterable[Mapping[str, torch.Tensor]]] | None
    measurement: Measurement
    lifecycle: Lifecycle
    context: RunContext
    saving: Saving
    anomalies: Anomalies
    rolling_back: RollingBack
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
    live_parts: LiveParts | None = None
    """What another replica is given; needed if there may be others."""

    def __attrs_post_init__(self) -> None:
        job = self.job
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._parameters = named_parameters(self.parts)
        self._contributors = Contributors(self.parts, self.mesh)
        self._skips_on_device = can_skip_on_device(self.optimizer, self.device)
        self._first_steps = FirstSteps(self._parameters, self.loss, self.optimizer_words)
        self._first_save = FirstSave(self.optimizer, self.optimizer_words, self._parameters, self.context.log)
        self._agreement = Agreement()
        # of all pipeline stages, asked for once, at the first step that is logged
        self._auxiliary_names: list[str] | None = None
        self._last_save = time.monotonic()
        self._may_skip = self.lifecycle.listens("before_optimizer_step")
        self._listening = self._may_skip or self.lifecycle.listens("step_end")
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
            evaluated: Mapping[str, float] = {}
            if self._is_due(job.eval.interval) and self.evaluation is not None:
                evaluated = self.evaluate()
            self._ask_for_timely_save()
            save, stop, is_writing = self._agreement.exchange(self.context.requests, is_writing=self.saving.is_writing)
            self.saving.look(self.step, is_written=not is_writing)
            if save or stop or self.step == last or self._is_checkpoint_due() or self._put_off_save:
                self._save(evaluated, is_last=stop or self.step == last)
            if self.anomalies.to_leave_out is not None:
                self._roll_back()
            elif stop or self.step == last:
                break
        self._agreement.finish()
        self._log_pending()
        self.saving.finish(must_succeed=True)
        stopped = self._agreement.reason(self.context.requests) if self.step < last else ""
        self.lifecycle.call("run_end", run=self.context, step=self.step, stopped=stopped)
        return stopped

    def evaluate(self) -> Mapping[str, float]:
        """Record the mean loss over the validation data, weighted by tokens, over all ranks. Given up on a stop, and
        then without values."""
        assert self.evaluation is not None
        self._log_pending()
        sums = torch.zeros(2, dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        self._set_training(False)
        n_ahead = torch.full_like(sums, sum(getattr(one, "looks_ahead", False) for one in self._modules()))
        n_targets = 0
        for batch in self.evaluation():
            n_targets += _count_targets(batch)
            sums += torch.stack(self.executor.evaluate(self._to_device(batch)))
            if self._agreement.any_rank(bool(self.context.requests.stop)):
                break
        self._set_training(True)
        if self._agreement.any_rank(bool(self.context.requests.stop)):
            return {}  # a part of the validation set is not what was asked for; a resumed run evaluates again
        total, count = self.mesh.sum_over(sums, LOSS_AXES).tolist()
        n_valid = self.mesh.sum_over(torch.full_like(sums, n_targets), DATA_AXES)[0].item()
        if sums.dtype == torch.float64:  # fp32 does not count beyond 2**24
            self.loss.refuse_count(count, n_valid)
        loss = total / max(count, 1)
        perplexity = math.inf if loss > 700 else math.exp(loss)
        values = {"eval/loss": loss, "eval/perplexity": perplexity, "eval/tokens": count}
        if self.mesh.sum_over(n_ahead, ("pp",))[0].item():
            values["eval/looks_ahead"] = 1
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

        scale, token_scale, own_scales = self._scales(microbatches)
        LEDGER.start_step(scale, self.mesh.degrees["tp"], own_scales, token_scale)
        batches = [self._to_device(batch) for batch in microbatches]
        self._first_steps.before_gradients()
        total = self.executor.run(batches, scale)
        self._first_steps.after_gradients(step)
        if not self.replicas.is_alone:
            together = total.clone()
            others = [*self._contributors.accumulators(), *LEDGER.sums(), together]
            self.replicas.sum_step(self._parameters, others)

        logged = self._is_logged()
        metrics: dict[str, torch.Tensor] = {}
        if logged or self._listening:
            metrics["loss"] = (total if self.replicas.is_alone else together) * scale
        context = StepContext(step, self._tokens_so_far, metrics, logged)
        named = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        gradients = [*named.values()]
        squares = squared_norms(gradients)
        metrics["grad_norm"] = norm = global_norm(squares, self.mesh, self.device)
        if logged:
            metrics.update(self._norms_along_axes(squares))
        verdict = self.anomalies.judge(step, total, norm, [*named], squares, batches)
        self.lifecycle.call("before_optimizer_step", run=self.context, context=context)
        rate = self._set_learning_rates()
        self.saving.wait_until_copied()
        skip = self._skip_asked(verdict)
        if not self.replicas.commit(step):
            self._take_back_step()
            return
        self.measurement.count(self._tokens_a_step)
        self.anomalies.take_note()
        if skip:
            self._contributors.forget()
        else:
            left_out = verdict if self._skips_on_device else None
            self._contributors.before_optimizer_step(step / self.job.train.steps, left_out)
            clip_gradients(gradients, norm, self.job.train.clip_norm)
            self.optimizer.found_inf = left_out  # type: ignore[attr-defined]  # torch's
            self.optimizer.step()
            self._first_save.note_update(named)
        self.optimizer.zero_grad(set_to_none=True)

        self._log_pending()
        if self.anomalies.is_overdue:
            self.anomalies.look()
        if logged:
            self._submit(metrics, rate)
        self.lifecycle.call("step_end", run=self.context, context=context)

    def _take_back_step(self) -> None:
        self._contributors.forget()
        self.optimizer.zero_grad(set_to_none=True)
        self.loader.restart(self.loader.stream, self.loader.position - self.loader.samples_per_step)
        self.step -= 1

    def _modules(self) -> Iterator[nn.Module]:
        return (module for part in self.parts for module in part.modules())

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

    def _scales(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
        """One over the step's targets, over its tokens without padding, and over what the model counts for losses of
        its own (``MultiTokenModel``).

        On the device; counted here, where the batches still are in the host's memory.
        """
        counts = [
            sum(_count_targets(batch) for batch in microbatches),
            sum(_count_tokens(batch) for batch in microbatches),
        ]
        names: list[str] = []
        model: Any = self.parts[0]  # each part knows what the whole model counts
        if hasattr(model, "count_targets"):
            of_batches = [model.count_targets(batch) for batch in microbatches]
            names = [*of_batches[0]]
            counts += [sum(one[name] for one in of_batches) for name in names]
        if self.mesh.dp_size == 1 and self.replicas.is_alone:
            scale, of_tokens, *own = (torch.full((), 1 / max(count, 1), device=self.device) for count in counts)
        else:
            each = torch.stack([torch.full((), float(count), device=self.device) for count in counts])
            self.mesh.sum_over(each, DATA_AXES)
            scale, of_tokens, *own = self.replicas.sum(each).clamp_(min=1).reciprocal_().unbind()
        return scale, of_tokens, dict(zip(names, own, strict=True))

    def _to_device(self, batch: Mapping[str, torch.Tensor]) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

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
            skip = self._agreement.any_rank(self.context.requests.skip_step)
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

    def _norms_along_axes(self, squares: Mapping[Layout, Squares]) -> Mapping[str, torch.Tensor]:
        """Those that ``metrics.grad_norm_per`` asks for."""
        axes = self.job.metrics.grad_norm_per
        norms = norms_along(squares, self.mesh, axes, self.device) if axes else {}
        return {f"grad_norm/{name}": norm for name, norm in norms.items()}

    def _submit(self, metrics: dict[str, torch.Tensor], rate: float) -> None:
        auxiliary = {f"auxiliary/{name}": value for name, value in self._auxiliary_means().items()}
        if auxiliary and self.mesh.degrees["tp"] > 1:
            whole = self.mesh.sum_over(torch.stack([*auxiliary.values()]), ("tp",))
            auxiliary = dict(zip(auxiliary, whole.unbind(), strict=True))
        over_ranks = torch.stack([metrics["loss"], *auxiliary.values()])
        loss, *means = self.mesh.sum_over(over_ranks, LOSS_AXES).unbind()
        metrics["loss"] = loss
        norms = {name: value for name, value in metrics.items() if name.partition("/")[0] == "grad_norm"}
        tensors = {"loss": loss, **norms, **dict(zip(auxiliary, means, strict=True))}
        tensors.update(self._contributors.metrics(self.device))
        known = {"lr": rate, "tokens": self._tokens_so_far}
        tensors["skipped"] = self.anomalies.skipped
        self.measurement.submit(self.step, tensors, known, self.loader.seconds_waiting)

    def _auxiliary_means(self) -> Mapping[str, torch.Tensor]:
        """By the same names on every rank: a stage without the layers that have a loss has zero of it."""
        means = LEDGER.means()
        if self.mesh.degrees["pp"] == 1:
            return means
        if self._auxiliary_names is None:
            stages = self.mesh.gather_over("pp", [*means])
            self._auxiliary_names = list(dict.fromkeys(name for stage in stages for name in stage))
        nothing = torch.zeros((), device=self.device)
        return {name: means.get(name, nothing) for name in self._auxiliary_names}

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
        """By the first rank's clock."""
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
        if not self.anomalies.have_spared([*self._parameters.values()], self.step):
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
            "rolling_back": self.rolling_back.state(),
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
        self.step = self.rolling_back.go(stretch, self.step)
        self._put_off_save = False
        self.measurement.restart(self.loader.seconds_waiting)


def _count_targets(batch: Mapping[str, torch.Tensor]) -> int:
    return int(np.count_nonzero(batch["targets"].numpy() != IGNORED))


def _count_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """All but padding; those too that have no target."""
    positions = batch.get("positions")
    return batch["tokens"].numel() if positions is None else int(np.count_nonzero(positions.numpy() >= 0))
