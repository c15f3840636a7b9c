"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import nn

from forge_core.auxiliary import LEDGER
from forge_core.config.sections import Job
from forge_core.contracts.callback import RunContext, StepContext
from forge_core.contracts.executor import Executor
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.scheduler import Schedule
from forge_core.data.loader import BatchLoader
from forge_core.engine.agreement import Agreement
from forge_core.engine.contributors import Contributors
from forge_core.engine.executor import Batch
from forge_core.engine.gradients import clip_gradients, global_norm
from forge_core.engine.lifecycle import Lifecycle
from forge_core.engine.measurement import Measurement
from forge_core.engine.mesh import DATA_AXES, LOSS_AXES, Mesh
from forge_core.errors import NonFiniteError


@attrs.define(slots=False)
class Trainer:
    """One run in progress. ``step`` and ``loader.position`` are all there is to say about where it is."""

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
    save: Callable[[int, int], Path]
    """Writes a checkpoint of the given step and tokens."""
    record: Callable[[Mapping[str, float]], None]
    """Takes the values of a logged step or of an evaluation."""
    step: int = 0

    def __attrs_post_init__(self) -> None:
        job = self.job
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._contributors = Contributors(self.parts, self.mesh)
        self._agreement = Agreement()
        # of all pipeline stages, asked for once, at the first step that is logged
        self._auxiliary_names: list[str] | None = None
        self._may_skip = self.lifecycle.listens("before_optimizer_step")
        self._listening = self._may_skip or self.lifecycle.listens("step_end")
        # becomes and stays NaN at the first loss or gradient that is not finite; looked at when the host waits anyway
        self._health = torch.zeros((), device=self.device)
        self._tokens_a_step = (
            job.train.batch_size * (job.train.grad_accumulation or 1) * self.mesh.dp_size * job.train.seq_len
        )

    def run(self) -> bool:
        """Train to the last step. Returns false if the run was asked to stop early; it is then saved as well.

        Raises:
            NonFiniteError: a loss or gradient is not finite; nothing is saved after that.
        """
        job, last = self.job, self.job.train.steps
        self._set_training(True)
        self.lifecycle.call("run_start", run=self.context)
        self.measurement.restart(self.loader.seconds_waiting)
        for microbatches in self.loader:
            self.step += 1
            self._train_step(microbatches)
            if self._is_due(job.eval.interval) and self.evaluation is not None:
                self.evaluate()
            save, stop = self._agreement.exchange(self.context.requests)
            if save or stop or self._is_due(job.checkpoint.interval, at_end=True):
                self._save()
            if stop or self.step == last:
                break
        self._agreement.finish()
        self._log_pending()
        self.lifecycle.call("run_end", run=self.context, step=self.step)
        return self.step == last

    def evaluate(self) -> None:
        """Record the mean loss over the validation data, weighted by tokens, over all ranks; given up on a stop."""
        assert self.evaluation is not None
        self._log_pending()
        sums = torch.zeros(2, dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        self._set_training(False)
        for batch in self.evaluation():
            sums += torch.stack(self.executor.evaluate(self._to_device(batch)))
            if self._agreement.any_rank(bool(self.context.requests.stop)):
                break
        self._set_training(True)
        if self._agreement.any_rank(bool(self.context.requests.stop)):
            return  # a part of the validation set is not what was asked for; a resumed run evaluates again
        total, count = self.mesh.sum_over(sums, LOSS_AXES).tolist()
        loss = total / max(count, 1)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        values = {"eval/loss": loss, "eval/perplexity": perplexity, "eval/tokens": count}
        self.record({"step": self.step, **values})
        self.lifecycle.call("eval_end", run=self.context, step=self.step, metrics=values)
        self.measurement.restart(self.loader.seconds_waiting)

    def _train_step(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        step = self.step
        self.lifecycle.call("step_start", run=self.context, step=step)
        self.measurement.count(self._tokens_a_step)
        self._seed_generators()

        scale = self._one_over_valid_tokens(microbatches)
        LEDGER.start_step(scale)
        total = self.executor.run([self._to_device(batch) for batch in microbatches], scale)

        logged = self._is_logged()
        metrics: dict[str, torch.Tensor] = {}
        if logged or self._listening:
            metrics["loss"] = total * scale
        context = StepContext(step, self._tokens_so_far, metrics, logged)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        metrics["grad_norm"] = norm = global_norm(gradients, self.mesh)
        self.lifecycle.call("before_optimizer_step", run=self.context, context=context)
        rate = self._set_learning_rates()
        if self._skip_asked():
            self._contributors.forget()
        else:
            self._contributors.before_optimizer_step()
            clip_gradients(gradients, norm, self.job.train.clip_norm)
            self._health.add_(norm, alpha=0).add_(total, alpha=0)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        self._log_pending()
        if logged:
            self._submit(metrics, rate)
        self.lifecycle.call("step_end", run=self.context, context=context)

    def _set_training(self, training: bool) -> None:
        for part in self.parts:
            part.train(training)

    def _seed_generators(self) -> None:
        """Whatever draws random numbers in a step draws the same ones after a resume, with nothing to save."""
        seed = (self.job.train.seed * 1_000_003 + self.step * 8_191 + self.mesh.dp_rank) % 2**63
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend there is, for 80 µs
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)

    @property
    def _tokens_so_far(self) -> int:
        return self.loader.position * self.job.train.seq_len

    def _one_over_valid_tokens(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """On the device; counted here, where the targets still are in the host's memory."""
        valid = sum(int(np.count_nonzero(batch["targets"].numpy() != IGNORED)) for batch in microbatches)
        if self.mesh.dp_size == 1:
            return torch.full((), 1 / max(valid, 1), device=self.device)
        count = torch.full((), float(valid), device=self.device)
        return self.mesh.sum_over(count, DATA_AXES).clamp_(min=1).reciprocal_()

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

    def _skip_asked(self) -> bool:
        if not self._may_skip:
            return False
        skip = self._agreement.any_rank(self.context.requests.skip_step)
        self.context.requests.skip_step = False
        return skip

    def _is_logged(self) -> bool:
        return self.step == 1 or self._is_due(self.job.metrics.interval, at_end=True)

    def _is_due(self, interval: int, *, at_end: bool = False) -> bool:
        """Every ``interval`` steps and at the last step; an interval of 0 is never due, except at the end if asked."""
        at_last = self.step == self.job.train.steps
        return (interval > 0 and (self.step % interval == 0 or at_last)) or (at_end and at_last)

    def _submit(self, metrics: dict[str, torch.Tensor], rate: float) -> None:
        auxiliary = {f"auxiliary/{name}": value for name, value in self._auxiliary_means().items()}
        over_ranks = torch.stack([metrics["loss"], self._health, *auxiliary.values()])
        loss, health, *means = self.mesh.sum_over(over_ranks, LOSS_AXES).unbind()
        metrics["loss"] = loss
        tensors = {"loss": loss, "grad_norm": metrics["grad_norm"], **dict(zip(auxiliary, means, strict=True))}
        known = {"lr": rate, "tokens": self._tokens_so_far}
        self.measurement.submit(self.step, {**tensors, "health": health}, known, self.loader.seconds_waiting)

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
        health = values.pop("health")
        self.record(values)
        if self.mesh.rank == 0:
            self.lifecycle.call("step_logged", run=self.context, step=int(values["step"]), metrics=values)
        self._refuse_non_finite(health, int(values["step"]))

    def _refuse_non_finite(self, health: float, step: int) -> None:
        if not math.isfinite(health):
            raise NonFiniteError(
                f"the loss or the gradient is not finite at step {step} or shortly before it; no checkpoint has been "
                "written since. Lower optimizer.lr, or look at the data of these steps."
            )

    def _save(self) -> None:
        self._log_pending()
        health = self.mesh.sum_over(self._health.clone(), LOSS_AXES)
        self._refuse_non_finite(float(health), self.step)
        path = self.save(self.step, self._tokens_so_far)
        self.lifecycle.call("checkpoint_saved", run=self.context, step=self.step, path=path)
        self.measurement.restart(self.loader.seconds_waiting)
