"""The run, as the services of the training loop see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch.distributed.tensor import DTensor

from forge_core.config.sections import Job
from forge_core.contracts.callback import Requests, RunContext
from forge_core.contracts.supervisor import Supervisor
from forge_core.data.loader import BatchLoader
from forge_core.distributed.consensus import Consensus
from forge_core.distributed.mesh import Mesh, StageScalars
from forge_core.errors import PluginError
from forge_core.train.events import Events


class Directory(Protocol):
    """The files of a run. Only rank 0 writes."""

    def write_event(self, event: str, **facts: Any) -> None:
        """Add a line to ``events.jsonl``."""

    def sync(self) -> None:
        """Make all written so far survive a power cut."""

    def forget_after(self, step: int) -> None:
        """Take the lines of later steps back."""


class Reports:
    """Values that callbacks report of a step, until they are logged with it."""

    def __init__(self) -> None:
        self._values: dict[str, torch.Tensor] = {}
        self._stages = StageScalars("callbacks")

    def clear(self) -> None:
        """Forget those of a step that is not logged."""
        self._values.clear()

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Same as ``RunContext.report``.

        Raises:
            PluginError: a value is no scalar tensor.
        """
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.ndim:
                found = f"a tensor of the shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
                raise PluginError(f"run.report takes device scalars; {name!r} is {found}")
            self._values[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach()

    def take(self, mesh: Mesh, device: torch.device) -> dict[str, torch.Tensor]:
        """Those of this step, summed over pipeline stages. All ranks of a pipeline call it.

        Raises:
            PluginError: a name that no stage has reported at the first logged step.
        """
        values, self._values = self._values, {}
        return self._stages.summed(mesh, values, device)


@attrs.frozen(kw_only=True)
class Run:
    """Each service is given it first, and takes what it needs."""

    context: RunContext
    """The run as callbacks see it."""
    mesh: Mesh
    directory: Directory
    loader: BatchLoader
    """Its position says where in the data the run is."""
    events: Events
    supervisor: Supervisor
    consensus: Consensus
    record: Callable[[Mapping[str, float]], None]
    """Takes the values of a logged step or of an evaluation, to files and trackers."""
    reports: Reports = attrs.field(factory=Reports)
    """Takes what callbacks report of a step."""

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

    def emit(self, event: str, **facts: Any) -> list[Any]:
        """Call the callbacks that listen to an event, and return what each returns."""
        return self.events.call(event, run=self.context, **facts)

    def is_due(self, step: int, interval: int) -> bool:
        """Return whether something is done after ``step`` that is done every ``interval`` steps and at the last step.
        An interval of 0 is never due."""
        return interval > 0 and (step % interval == 0 or step == self.job.train.steps)
