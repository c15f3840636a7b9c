"""Taking a run back to a checkpoint while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge_core.checkpoint.contents import SampleRange
from forge_core.checkpoint.run_mirror import NoMirror
from forge_core.checkpoint.store import Checkpoint, CheckpointStore
from forge_core.distributed.collective_errors import run_on_rank0
from forge_core.distributed.timeouts import longer_timeouts
from forge_core.errors import ConfigError, NonFiniteError
from forge_core.train.run import Run
from forge_core.train.step_guard import StepGuard


@attrs.define
class Rollback:
    """All ranks call the same methods at the same steps."""

    run: Run
    store: CheckpointStore
    mirror: NoMirror
    guard: StepGuard
    restore: Callable[[Checkpoint], None]
    """Fills model, optimizer and callbacks."""
    attempts: int = 0
    """How often the run has gone back to the checkpoint of ``to_step``."""
    to_step: int = -1

    def state(self) -> Mapping[str, Any]:
        """State that decides the future, as JSON values."""
        return {"attempts": self.attempts, "to_step": self.to_step}

    def go_back(self, step: int) -> int:
        """Take everything back to the newest checkpoint from before the steps that the guard leaves out, whose samples
        are left out from now on. Nothing is being saved then.

        Args:
            step: where the run is.

        Returns:
            The step of the checkpoint.

        Raises:
            NonFiniteError: there is none, or this has been tried often enough.
        """
        left_out, section = self.guard.to_leave_out, self.run.job.run
        assert left_out is not None, "it is what the run goes back for"
        with self.run.supervisor.patient(section.first_step_timeout), longer_timeouts(section):
            checkpoint = self._checkpoint_before(left_out)
            if checkpoint.step > self.to_step:
                self.attempts, self.to_step = 0, checkpoint.step
            if self.attempts == self.run.job.anomalies.give_up_after:
                place = checkpoint.path.name
                often = f"has gone back to {place} {self.attempts} times, which is anomalies.give_up_after"
                raise self._giving_up(left_out, f"the run {often}")
            self.attempts += 1
            self.restore(checkpoint)
        state, loader = checkpoint.state(), self.run.loader
        first, last = loader.stream.numbers_of(left_out.start, left_out.stop)
        loader.restart(loader.stream.without(left_out.start, left_out.stop), state["position"])
        if loader.stream.streams is not None:
            loader.stream.streams.restart(**state["streams"])
        self.guard.restart(state.get("anomalies"))
        run_on_rank0(lambda: self._take_back_files(checkpoint.step))
        self.mirror.rolled_back(checkpoint.step)
        self.run.log(
            f"rolled back from step {step} to {checkpoint.path.name}, {self.attempts} of at most "
            f"{self.run.job.anomalies.give_up_after} times; from now on without the samples {first} to {last}"
        )
        self.run.directory.write_event(
            "rolled_back", step=step, to_step=checkpoint.step, attempt=self.attempts, samples=[[first, last]]
        )
        return checkpoint.step

    def _checkpoint_before(self, left_out: SampleRange) -> Checkpoint:
        try:
            checkpoint = self.store.newest(self.run.log, before=left_out.first_step)
        except ConfigError as error:  # all are damaged
            raise self._giving_up(left_out, str(error)) from error
        if checkpoint is None:
            raise self._giving_up(left_out, f"there is no checkpoint from before step {left_out.first_step}")
        return checkpoint

    def _giving_up(self, left_out: SampleRange, why: str) -> NonFiniteError:
        if self.run.mesh.rank > 0:
            return NonFiniteError("")
        first, last = self.run.loader.stream.numbers_of(left_out.start, left_out.stop)
        look = f"Look at the samples {first} to {last} of the data, and at the lines before this one"
        if self.guard.origin is not None:
            look = f"Look at {self.guard.origin}, whose output was the first that was not finite"
        return NonFiniteError(
            f"the loss, the gradient or an input is not finite, or the gradient is a spike, in {_steps(left_out)}, and "
            f"{why}. {look}; or lower optimizer.lr."
        )

    def _take_back_files(self, step: int) -> None:
        """On rank 0."""
        self.store.put_aside(step)
        self.run.directory.forget_after(step)


def _steps(left_out: SampleRange) -> str:
    if left_out.steps == 1:
        return f"step {left_out.first_step}"
    return f"the {left_out.steps} steps from {left_out.first_step} on"
