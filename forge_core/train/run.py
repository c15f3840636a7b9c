"""The run, as the services of the training loop see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import torch

from forge_core.config.sections import Job
from forge_core.contracts.callback import Requests, RunContext
from forge_core.distributed.consensus import Consensus
from forge_core.distributed.mesh import Mesh
from forge_core.train.events import Events


class Directory(Protocol):
    """The files of a run. Only rank 0 writes."""

    def write_event(self, event: str, **facts: Any) -> None:
        """Add a line to ``events.jsonl``."""

    def forget_after(self, step: int) -> None:
        """Take the lines of later steps back."""


class Supervisor(Protocol):
    """Ends this rank if it, or another one, does not come forward."""

    def beat(self) -> None:
        """Say that this rank comes forward."""

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """A context in which a step may take so many seconds."""


@attrs.frozen(kw_only=True)
class Run:
    """Each service is given it first, and takes what it needs."""

    context: RunContext
    """The run as callbacks see it."""
    mesh: Mesh
    directory: Directory
    events: Events
    supervisor: Supervisor
    consensus: Consensus
    record: Callable[[Mapping[str, float]], None]
    """Takes the values of a logged step or of an evaluation, to files and trackers."""

    @property
    def job(self) -> Job:
        return self.context.job

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def requests(self) -> Requests:
        return self.context.requests

    def log(self, line: str) -> None:
        """Print a line, on rank 0."""
        self.context.log(line)

    def emit(self, event: str, **facts: Any) -> None:
        """Call the callbacks that listen to an event."""
        self.events.call(event, run=self.context, **facts)

    def is_due(self, step: int, interval: int) -> bool:
        """Return whether something is done after ``step`` that is done every ``interval`` steps and at the last step.
        An interval of 0 is never due."""
        return interval > 0 and (step % interval == 0 or step == self.job.train.steps)
