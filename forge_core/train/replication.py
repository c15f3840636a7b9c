"""The other replicas of this run's model, as the training loop sees them. Usually there are none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from forge_core.config.sections import Job
from forge_core.contracts.callback import Callback
from forge_core.contracts.data_source import Source
from forge_core.contracts.replication import Handover, LiveState, Replication, Share
from forge_core.data.streams import StreamsByPosition
from forge_core.distributed.fingerprint import fingerprint
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError
from forge_core.ops.local_tensor import local_tensor
from forge_core.registry.catalog import Catalog
from forge_core.train.run import Run

_MAY_DIFFER = ("run.", "checkpoint.resume", "checkpoint.load")
"""Keys of the jobs of replicas."""


class Replicas:
    """There are none: this run is alone, and nothing here costs anything."""

    share = Share(0, 1, -1)
    """The share in the last step that has begun."""

    def join(self, step: int, give: Callable[[], LiveState], take: Callable[[LiveState], int]) -> None:
        """Before the first step.

        Args:
            step: where this one is.
            give: this rank's state, between two steps.
            take: makes the given state this rank's; returns the step that it is of.
        """

    def begin_step(self, step: int, sync: Callable[[], None]) -> bool:
        """Find out who takes part in the step after ``step``, and which samples are this replica's. It may find itself
        at another step afterwards, with the state of another replica.

        Args:
            sync: finishes what is still to be said of earlier steps. The host waits for the device.

        Returns:
            Whether there is a step: none, on all ranks, once one is told to stop while it waits for other replicas.
        """
        return True

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over the ranks of this number in all replicas; worth something only if ``commit`` says so."""
        return tensor

    def sum_step(
        self, parameters: Mapping[str, torch.Tensor], loss: torch.Tensor, more: Callable[[], Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """Sum as ``sum`` does: the gradients of ``parameters``, and what ``more`` returns. A parameter that one replica
        did not use, and another did, has a gradient in both afterwards.

        Returns:
            The sum of ``loss``, which stays as it is.
        """
        return loss

    def any_replica(self, flag: torch.Tensor) -> torch.Tensor:
        """Return whether an fp32 flag is 1 in any of them."""
        return flag

    def any_replica_asks(self, flag: bool) -> bool:
        """Return whether any of them says so. The host waits."""
        return flag

    def commit(self, step: int) -> bool:
        """Return whether ``step`` counts. If not, everything must be as if it had not been tried."""
        return True


class JoinedReplicas(Replicas):
    """All ranks of a replica call the same methods at the same points.

    Args:
        replication: joins this run to the others.
    """

    def __init__(self, replication: Replication, run: Run, catalog: Catalog) -> None:
        self._replication = replication
        self._digest = _digest(run.job, catalog, run.mesh)
        self._run = run
        self._committed = 0
        self._taken_over: int | None = None

    def join(self, step: int, give: Callable[[], LiveState], take: Callable[[LiveState], int]) -> None:
        def take_and_note(state: LiveState) -> None:
            self._taken_over = take(state)

        with self._patiently():
            self._replication.join(Handover(step, give, take_and_note))

    def begin_step(self, step: int, sync: Callable[[], None]) -> bool:
        sync()  # while everything still is as it was in that step
        with self._patiently():
            share = self._replication.begin_step()
        if share is None:
            return False
        if self._taken_over is not None:
            self._run.log(f"took over the state of another replica, at step {self._taken_over}; this one was at {step}")
            self._run.directory.write_event("taken_over", step=self._taken_over, from_step=step)
            step, self._taken_over = self._taken_over, None
        if share == self.share:
            return True
        self.share = share
        self._run.loader.deal(
            share.index * self._run.mesh.dp_size + self._run.mesh.dp_rank, share.count * self._run.mesh.dp_size
        )
        self._refuse_other_job()
        who = "alone" if share.count == 1 else f"as number {share.index + 1} of {share.count} replicas"
        self._run.log(f"from step {step + 1} on {who}")
        self._run.directory.write_event("replicas", step=step, index=share.index, count=share.count)
        return True

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self._replication.sum([tensor])
        return tensor

    def sum_step(
        self, parameters: Mapping[str, torch.Tensor], loss: torch.Tensor, more: Callable[[], Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        total = loss.clone()
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        used = torch.tensor([float(one.grad is not None) for one in trained], device=self._run.device)
        for one in trained:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        gradients = [local_tensor(one.grad) for one in trained if one.grad is not None]
        self._replication.sum([*gradients, used, *more(), total])
        for one, is_used in zip(trained, used.tolist(), strict=True):
            if not is_used:
                one.grad = None
        return total

    def any_replica(self, flag: torch.Tensor) -> torch.Tensor:
        return (self.sum(flag.clone()) > 0).float()

    def any_replica_asks(self, flag: bool) -> bool:
        return bool(self.any_replica(torch.full((), float(flag), device=self._run.device)).item())

    def commit(self, step: int) -> bool:
        if self._replication.commit():
            self._committed += 1
            return True
        self._run.log(f"step {step} is done again: another replica was lost in it, or could not be reached")
        self._run.directory.write_event("step_again", step=step)
        return False

    def _patiently(self) -> AbstractContextManager[None]:
        return self._run.supervisor.patient(self._run.job.run.first_step_timeout)

    def _refuse_other_job(self) -> None:
        """Compare with the replica that has been there for longest.

        Raises:
            ConfigError: this one was started with another job.
        """
        digests = torch.zeros(self.share.count, dtype=torch.int64, device=self._run.device)
        committed = torch.zeros_like(digests)
        digests[self.share.index], committed[self.share.index] = self._digest, self._committed
        if not self._replication.sum([digests, committed]):
            return  # the step will be done again, with others
        longest = int(committed.argmax())
        if digests[longest].item() != self._digest:
            raise ConfigError(
                f"this replica has been started with another job, mesh or packages than number {longest + 1} of the "
                f"{self.share.count}; start all of them alike (only run.*, checkpoint.resume and checkpoint.load may "
                "differ)"
            )


def refuse_unfit_replications(callbacks: Sequence[tuple[str, Callback]], source: Source) -> None:
    """Raises ConfigError if more than one of a job's callbacks joins it to others, or one does and the data are
    streams, whose states a replica that comes back would not have."""
    found = [name for name, callback in callbacks if isinstance(callback, Replication)]
    if len(found) > 1:
        raise ConfigError(f"callbacks: {' and '.join(found)} each join replicas; keep one")
    if found and isinstance(source, StreamsByPosition):
        raise ConfigError(f"callbacks: {found[0]} joins replicas, among which streams cannot be dealt; use other data")


def _digest(job: Job, catalog: Catalog, mesh: Mesh) -> int:
    """Below 2⁵⁶, so that it can be summed with zeros as an int64."""
    facts = fingerprint(job, catalog) | {f"degree {axis}": str(degree) for axis, degree in mesh.degrees.items()}
    text = repr(sorted((key, value) for key, value in facts.items() if not key.startswith(_MAY_DIFFER)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
