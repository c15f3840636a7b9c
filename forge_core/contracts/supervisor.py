"""Supervisors: they notice that a rank is lost, say which one, and end the ranks that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge_core.contracts.callback import Callback

if TYPE_CHECKING:
    from forge_core.config.sections import RunSection


class Supervisor(Callback):
    """Base class. Supervises nothing: ranks wait for each other until torch's own time limit ends them.

    The training thread calls all methods. It is a callback, too, and hears of the run's events before all others.
    """

    calling: Callable[[], str] = staticmethod(lambda: "")
    """Name the callback in which the training thread is, and its event, or nothing; any thread may ask. The engine sets
    it once it has built callbacks."""

    def beat(self, more: float = 0.0) -> None:
        """Say that this rank has got further.

        Args:
            more: seconds that it may take from here, beyond those of a step.
        """

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Let the work in this context take so many seconds longer than a step."""
        self.beat(seconds)
        yield
        self.beat()

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Turn what a collective raises when another rank is gone into a sentence that says which one.

        Raises:
            LostPeerError: instead of the collective's error.
        """
        yield

    def close(self) -> None:
        """The last call, when the process group has been left: after a failure, too."""


class SupervisorFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, run: RunSection, run_directory: Path) -> Supervisor:
        """Build it, on each rank of a run of several, which are in a process group and may talk to each other. A rank
        that is alone has it, too, if its job names the supervisor.

        Args:
            run: has the time limits ``step_timeout`` and ``first_step_timeout``, in seconds.
            run_directory: of the run. It may not be there yet.
        """
