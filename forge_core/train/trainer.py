"""The training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from forge_core.contracts.callback import StepContext
from forge_core.contracts.replication import LiveState
from forge_core.contracts.scheduler import Schedule
from forge_core.errors import noting
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.train.build import Built
from forge_core.train.evaluation import Evaluations
from forge_core.train.executor import Batch
from forge_core.train.gradients import Gradients, clip_gradients, norms_along
from forge_core.train.metrics import Metrics
from forge_core.train.replication import Replicas
from forge_core.train.rollback import Rollback
from forge_core.train.run import Run
from forge_core.train.saving import Saving
from forge_core.train.scales import Scales, step_scales, to_device
from forge_core.train.state_transfer import give_state, take_state
from forge_core.train.step_guard import StepGuard, can_skip_on_device
from forge_core.train.step_modules import StepModules


@attrs.define(kw_only=True, slots=False)
class Trainer:
    """The training of a run. ``step`` and ``run.loader.position`` say where it is."""

    run: Run
    built: Built
    schedule: Schedule
    step_modules: StepModules
    evaluations: Evaluations
    metrics: Metrics
    guard: StepGuard
    rollback: Rollback
    saving: Saving
    replicas: Replicas
    restore_callbacks: Callable[[], None] = lambda: None
    """Fills the tensors of callbacks, which are there now, if the run is resumed."""
    step: int = 0

    def __attrs_post_init__(self) -> None:
        model, optimizer = self.built.model, self.built.optimizer
        self._parameters = model.parameters
        self.built.phases.split_groups(optimizer)
        self._base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._skips_on_device = can_skip_on_device(optimizer, self.run.device)
        model.loss.look(steps=2)
        self._may_skip = self.run.events.listens("before_optimizer_step")

    def train(self, *, save_first: bool) -> str:
        """Train to the last step. Returns why the run was stopped early, saved as well; nothing if it was not.

        Args:
            save_first: whether a checkpoint may be due before the first step.

        Raises:
            NonFiniteError: too many updates had to be left out.
        """
        for part in self.built.model.parts:
            part.train()
        self.run.emit("run_start")
        self.restore_callbacks()
        if save_first:
            self.saving.save_first()
        self.replicas.join(self.step, lambda: give_state(self.saving.contents, self.step), self._take_state)
        self.metrics.restart()
        for microbatches in self._microbatches_of_steps():
            self.step += 1
            if not self._train_step(microbatches):
                continue  # another replica was lost in it
            values = self.evaluations.run_if_due(self.step)
            self.saving.ask_for_timely_save()
            votes = self.run.consensus.votes()
            self.saving.after_step(self.step, values, votes)
            if self.guard.has_failed:
                self._go_back()
            elif votes.stop or self.step == self.run.job.train.steps:
                break
        return self._finish()

    def _microbatches_of_steps(self) -> Iterator[Sequence[Batch]]:
        seed, loader = self.run.job.train.seed, self.run.loader
        wants_noise = any("noise" in getattr(part, "needs", ()) for part in self.built.model.parts)
        while self.replicas.begin_step(self.step, self.metrics.sync):
            with noting(f"raised by data source {self.run.job.data.qualified_name}", ours=True):
                step = next(loader)
            yield loader.with_noise(step, seed) if wants_noise else step
        self.saving.save_between_steps(self.step)

    def _train_step(self, microbatches: Sequence[Batch]) -> bool:
        """Return whether the step counts. If other replicas say that it does not, everything is as before it."""
        run, step = self.run, self._begin_step()
        scales = step_scales(microbatches, self.built.model.parts[0], run.mesh, run.device, self.replicas)
        batches = [to_device(batch, run.device) for batch in microbatches]
        self.metrics.begin(step)
        total = self._forward_and_backward(batches, scales)
        run.emit("gradients_end", step=step)
        loss = self.replicas.sum_step(self._parameters, total, self._sums_of_modules) * scales.targets
        self.built.phases.drop_frozen_gradients(step)

        gradients = Gradients(self._parameters, run.mesh, run.device)
        context, values = self._describe_step(loss, gradients)
        verdict = self.guard.check(step, total, gradients, batches)
        run.emit("before_optimizer_step", context=context)
        rate = self._set_learning_rates()
        self.saving.wait_until_copied()
        skip = self._skip_asked(verdict)
        if not self.replicas.commit(step):
            self._undo_step()
            return False
        self.metrics.count(microbatches)
        self.guard.count()
        self._update(gradients, verdict, skip=skip)
        self.metrics.log_pending()
        self.guard.sync_if_overdue()
        if context.logged:
            values["loss"] = self.metrics.submit(context, rate, scales.n_targets)
        left_out = torch.ones_like(verdict) if skip else verdict
        run.emit("step_end", context=attrs.evolve(context, left_out=left_out))
        self.metrics.send()
        return True

    def _begin_step(self) -> int:
        """Seed the generators: a step draws the same random numbers after a resume, with nothing to save; and others
        on ranks, of all replicas, that have other samples, positions or layers."""
        self.run.reports.clear()
        self.run.consensus.is_writing = self.saving.is_writing
        self.run.emit("step_start", step=self.step)
        self.built.phases.enter(self.run.context, self.step)
        self.run.emit("gradients_start")
        mesh, device = self.run.mesh, self.run.device
        number = self.replicas.share.index * mesh.world_size + mesh.noise_rank
        seed = (self.run.job.train.seed * 1_000_003 + self.step * 8_191 + number) % 2**63
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend there is, for 80 µs
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        return self.step

    def _forward_and_backward(self, batches: Sequence[Batch], scales: Scales) -> torch.Tensor:
        """Add the gradients of the mean loss to the parameters' ``grad``. Returns this rank's summed loss."""
        model, loss_scale = self.built.model, self.guard.loss_scale
        scale, factor = scales.targets, loss_scale.factor
        LEDGER.start_step(scale, self.run.mesh.degrees["tp"], scales.own, scales.tokens, factor)
        with noting(f"in forward or backward of the model {self.run.job.model.qualified_name}"):
            total = model.run(batches, scale if factor is None else scale * factor)
        model.loss.refuse_if_wrong()
        loss_scale.unscale(one.grad for one in self._parameters.values() if one.grad is not None)
        return total

    def _sums_of_modules(self) -> list[torch.Tensor]:
        return [*self.step_modules.accumulators(), *LEDGER.sums(), *self.metrics.sums_of_sources()]

    def _describe_step(self, loss: torch.Tensor, gradients: Gradients) -> tuple[StepContext, dict[str, torch.Tensor]]:
        """The step for callbacks, and its metrics, to be completed."""
        is_logged = self.metrics.is_logged(self.step)
        values = {"loss": loss, "grad_norm": gradients.norm}
        axes = self.run.job.metrics.grad_norm_per
        if is_logged and axes:
            norms = norms_along(gradients.squares, self.run.mesh, axes, self.run.device)
            values |= {f"grad_norm/{name}": norm for name, norm in norms.items()}
        tokens = self.run.loader.position * self.run.job.train.seq_len
        return StepContext(self.step, tokens, values, is_logged), values

    def _set_learning_rates(self) -> float:
        """Return the rate of the first group, which is logged."""
        multiplier, groups = self.schedule(self.step), self.built.optimizer.param_groups
        for group, base in zip(groups, self._base_rates, strict=True):
            group["lr"] = base * multiplier * self.built.phases.scale_of(group, self.step)
        return float(groups[0]["lr"])

    def _skip_asked(self, verdict: torch.Tensor) -> bool:
        """By a callback; or by the verdict, where the host has to know."""
        skip = not self._skips_on_device and bool(verdict.item())
        if not skip and self._may_skip:
            skip = self.replicas.any_replica_asks(self.run.consensus.any_rank(self.run.requests.skip_step))
        self.run.requests.skip_step = False
        return skip

    def _update(self, gradients: Gradients, verdict: torch.Tensor, *, skip: bool) -> None:
        optimizer = self.built.optimizer
        left_out = torch.ones_like(verdict) if skip else verdict if self._skips_on_device else None
        self.step_modules.before_optimizer_step(self.step / self.run.job.train.steps, left_out)
        if not skip:
            clip_gradients(optimizer, gradients, self.run.job.train.clip_norm)
            optimizer.left_out = left_out  # type: ignore[attr-defined]  # the contract of leaves_out
            optimizer.found_inf = left_out  # type: ignore[attr-defined]  # torch's
            with noting(f"raised by optimizer {self.run.job.optimizer.qualified_name}"):
                optimizer.step()
            self.run.emit("update_end", names=gradients.named)
        optimizer.zero_grad(set_to_none=True)

    def _undo_step(self) -> None:
        self.step_modules.forget()
        self.built.optimizer.zero_grad(set_to_none=True)
        loader = self.run.loader
        loader.restart(loader.stream, loader.position - loader.samples_per_step)
        self.step -= 1

    def _go_back(self) -> None:
        """To the checkpoint from before the steps that are to be left out."""
        self.metrics.sync()
        self.saving.finish()
        self.step = self.rollback.go_back(self.step)
        self.saving.restart()
        self.metrics.restart()

    def _finish(self) -> str:
        run = self.run
        self.metrics.log_pending()
        self.saving.finish_run()
        stopped = run.consensus.reason() if self.step < run.job.train.steps else ""
        run.emit("run_end", step=self.step, stopped=stopped)
        return stopped

    def _take_state(self, state: LiveState) -> int:
        self.saving.finish()  # what is being saved must not change
        self.step = take_state(self.saving.contents, state)
        self.saving.restart()
        return self.step
