"""Taking a run back to a checkpoint while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs

from forge_core.checkpoint.run_mirror import NoMirror
from forge_core.checkpoint.store import Checkpoint, CheckpointStore
from forge_core.config.sections import AnomaliesSection
from forge_core.data.loader import BatchLoader
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError, NonFiniteError
from forge_core.run.directory import RunDirectory
from forge_core.train.step_guard import SampleRange, StepGuard


@attrs.define
class Rollback:
    """All ranks call the same methods at the same steps."""

    section: AnomaliesSection
    mesh: Mesh
    store: CheckpointStore
    loader: BatchLoader
    anomalies: StepGuard
    directory: RunDirectory
    say: Callable[[str], None]
    load: Callable[[Checkpoint], None]
    """Fills model, optimizer and callbacks."""
    patiently: Callable[[], AbstractContextManager[None]]
    """While it is found and loaded: reading may take longer than a step."""
    mirror: NoMirror = attrs.field(factory=NoMirror)
    attempts: int = 0
    """How often the run has gone back to the checkpoint of ``to_step``."""
    to_step: int = -1

    def state(self) -> Mapping[str, Any]:
        """State that decides the future, as JSON values."""
        return {"attempts": self.attempts, "to_step": self.to_step}

    def go(self, stretch: SampleRange, step: int) -> int:
        """Take everything back to the newest checkpoint from before ``stretch``, whose samples are left out from now
        on. With nothing being saved.

        Args:
            step: where the run is.

        Returns:
            The step of the checkpoint.

        Raises:
            NonFiniteError: there is none, or this has been tried often enough.
        """
        with self.patiently():
            checkpoint = self._checkpoint_before(stretch)
            if checkpoint.step > self.to_step:
                self.attempts, self.to_step = 0, checkpoint.step
            if self.attempts == self.section.give_up_after:
                place = checkpoint.path.name
                often = f"has gone back to {place} {self.attempts} times, which is anomalies.give_up_after"
                raise self._giving_up(stretch, f"the run {often}")
            self.attempts += 1
            self.load(checkpoint)
        state = checkpoint.state()
        first, last = self.loader.stream.places_of(stretch.start, stretch.stop)
        self.loader.restart(self.loader.stream.without(stretch.start, stretch.stop), state["position"])
        self.anomalies.restart(state.get("anomalies"))
        run_on_all_ranks(lambda: self._take_back_files(checkpoint.step))
        self.mirror.rolled_back(checkpoint.step)
        self.say(
            f"rolled back from step {step} to {checkpoint.path.name}, {self.attempts} of at most "
            f"{self.section.give_up_after} times; from now on without the samples {first} to {last}"
        )
        self.directory.write_event(
            "rolled_back", step=step, to_step=checkpoint.step, attempt=self.attempts, samples=[[first, last]]
        )
        return checkpoint.step

    def _checkpoint_before(self, stretch: SampleRange) -> Checkpoint:
        try:
            checkpoint = self.store.newest(self.say, before=stretch.first_step)
        except ConfigError as error:  # all are damaged
            raise self._giving_up(stretch, str(error)) from error
        if checkpoint is None:
            raise self._giving_up(stretch, f"there is no checkpoint from before step {stretch.first_step}")
        return checkpoint

    def _giving_up(self, stretch: SampleRange, why: str) -> NonFiniteError:
        if self.mesh.rank > 0:
            return NonFiniteError("")
        first, last = self.loader.stream.places_of(stretch.start, stretch.stop)
        look = f"Look at the samples {first} to {last} of the data, and at the lines before this one"
        if self.anomalies.origin is not None:
            look = f"Look at {self.anomalies.origin}, whose output was the first that was not finite"
        return NonFiniteError(
            f"the loss, the gradient or an input is not finite, or the gradient is a spike, in {_steps(stretch)}, and "
            f"{why}. {look}; or lower optimizer.lr."
        )

    def _take_back_files(self, step: int) -> None:
        if self.mesh.rank == 0:
            self.store.put_aside(step)
            self.directory.forget_after(step)


def _steps(stretch: SampleRange) -> str:
    if stretch.steps == 1:
        return f"step {stretch.first_step}"
    return f"the {stretch.steps} steps from {stretch.first_step} on"
