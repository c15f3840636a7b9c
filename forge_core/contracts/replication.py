"""Replication: several runs of one job, each with ranks of its own, train one model together and outlive each other.

A replica is an ordinary run: its own process group, mesh and directory. A callback that is a ``Replication`` is what
joins it to the others. In each step the replicas that are there share out the samples, sum what they have found, and
vote; a replica that is lost costs that step a second try, and no sample. One that comes late, or back, is given the
state of one that is up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.contracts.callback import Callback

if TYPE_CHECKING:
    import torch


@attrs.frozen
class Share:
    """A replica's part of one step."""

    index: int
    """Its number among the replicas that take part, 0 to ``count − 1``."""
    count: int
    formation: int
    """Changes whenever others take part than before."""


LiveState = Mapping[str, Any]
"""One rank's part of everything that decides the future of a run: ``"tensors"``, by name, and ``"facts"``, a string.
The rank of the same number in another replica can go on from it."""


@attrs.frozen
class Handover:
    """How a replica gives its state to another."""

    step: int
    """The last step that this replica has done, in this start or an earlier one."""
    give: Callable[[], LiveState]
    """Between two steps only; from any thread, on some ranks and not on others. The tensors are the ones that are
    trained: they may be read until the next ``commit`` is called."""
    take: Callable[[LiveState], None]
    """Between two steps only, on all ranks of this replica, from the thread that trains.

    Raises:
        ConfigError: what is given belongs to another model or mesh.
    """


class Replication(Callback):
    """Base class. The engine calls these methods on all ranks of a replica at the same points, beside the events of a
    callback. A job has one such callback at most.

    What goes wrong between replicas is not raised: the sums are worth nothing then, ``commit`` says no, and the step is
    done again with the replicas that are left.
    """

    def join(self, handover: Handover) -> None:
        """Before the first step, after ``run_start``.

        Raises:
            ForgeError: the others cannot be found.
        """
        raise NotImplementedError

    def begin_step(self) -> Share | None:
        """Wait until it is settled who takes part in the next step.

        If this replica is behind, it is first given the state of another one, through ``Handover.take``; if another is
        behind, ``Handover.give`` is called.

        Returns:
            ``None``, on all ranks of this replica, if one of them is told to stop (``run.requests.stop``) before that:
            the run saves and ends.

        Raises:
            ForgeError: there are too few replicas, or the state could not be had.
        """
        raise NotImplementedError

    def sum(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Sum each tensor in place over the ranks of this number in all replicas that take part.

        The sums are the same bits in all of them. Shapes and dtypes must be alike; any device. Returns whether nothing
        has gone wrong in this step so far.
        """
        raise NotImplementedError

    def commit(self) -> bool:
        """Return whether the step counts. All ranks of a replica are given the same answer."""
        raise NotImplementedError
