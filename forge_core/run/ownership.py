"""What a run holds while it may write to its directory: the lease, the open directory, and its place at the mirror."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from forge_core.checkpoint.uploader import Copier
from forge_core.distributed.collective_errors import from_first_rank, on_all_ranks, slowly_from_first_rank
from forge_core.errors import ConfigError, MirrorError
from forge_core.job import dump_job
from forge_core.run.lease import FILE_NAME, Lease, refuse_unless_shared
from forge_core.run.mirror import Mirroring
from forge_core.run.setup import Begun, Prepared, mirror_of
from forge_core.run.time_limit import Deadline


@attrs.frozen
class Tenancy:
    """From when a run's directory is first written to until the run ends, however it does."""

    attempt: str
    """The lease's, on every rank."""
    lease: Lease | None
    """On the first rank."""
    mirroring: Mirroring | None

    def refuse_if_lost(self) -> None:
        """As ``Lease.refuse_if_lost``; other ranks hear of it from the first one."""
        if self.lease is not None:
            self.lease.refuse_if_lost()


@contextmanager
def tenancy(prepared: Prepared, environment: Mapping[str, Any], deadline: Deadline) -> Iterator[Tenancy]:
    """Take the run's directory over and open it, on all ranks.

    Args:
        environment: as ``describe_environment`` gives it, on the first rank.

    Raises:
        ConfigError: somebody else trains there, it cannot be written to, or has changed meanwhile.
        MirrorError: as ``Mirroring`` of it.
    """
    with _held(prepared) as lease:
        attempt = from_first_rank(lambda: lease.attempt if lease else "")
        on_all_ranks(lambda: refuse_unless_shared(prepared.directory.path, attempt))
        on_all_ranks(lambda: _open_directory(prepared, environment))
        try:
            yield Tenancy(attempt, lease, _mirroring(prepared, lease, deadline))
        finally:
            prepared.directory.close()


def complete(begun: Begun) -> None:
    """Do what a run that has all its steps could not do any more: copy to the mirror, and clear up, if it was killed
    while it ended."""
    has_mirror = begun.job.checkpoint.mirror is not None
    if not has_mirror and not from_first_rank(lambda: _is_left_untidy(begun)):
        return
    with _held(begun) as lease:
        if lease is not None:
            begun.store.remove_unfinished()
        mirroring = _mirroring(begun, lease, None)
        if mirroring is not None:
            try:
                mirroring.finish()
            finally:
                mirroring.close()


def _is_left_untidy(begun: Begun) -> bool:
    """By an attempt that was killed, and it can be mended: a run that is only to be looked at is left alone."""
    path, store = begun.directory.path, begun.store
    untidy = (path / FILE_NAME).exists() or any(store.unfinished())
    return untidy and os.access(path, os.W_OK) and os.access(store.path, os.W_OK)


@contextmanager
def _held(begun: Begun) -> Iterator[Lease | None]:
    lease = on_all_ranks(lambda: _lease(begun))
    try:
        yield lease
    finally:
        if lease is not None:
            lease.give_back()


def _lease(begun: Begun) -> Lease | None:
    """On the first rank: from here on, this run's directory is written to."""
    if begun.mesh.rank > 0:
        return None
    try:
        return Lease(begun.directory.path, begun.console.line, begun.ended)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {begun.directory.path}: {error.strerror}") from error


def _open_directory(prepared: Prepared, environment: Mapping[str, Any]) -> None:
    """On the first rank."""
    if prepared.mesh.rank > 0:
        return
    start, store = prepared.start, prepared.store
    if store.steps() != list(start.seen):
        raise ConfigError(f"{store.path} has changed while this run was being prepared; start it again")
    store.remove_unfinished()
    if start.keeps_until is not None and (aside := store.put_aside(start.keeps_until)):
        prepared.console.line(f"later checkpoints are now in {aside}")
    prepared.directory.open(prepared.job, environment, start.step)  # from here on, its job.toml says it is done


def _mirroring(begun: Begun, lease: Lease | None, deadline: Deadline | None) -> Mirroring | None:
    """After the run's own directory: the mirror's ``job.toml`` says that both are done.

    Raises:
        MirrorError: it cannot be written to, and the run is not to go on without it, or begins only now.
    """
    mirror = mirror_of(begun.job)
    if mirror is None:
        return None
    section, start, say = begun.job.checkpoint, begun.start, begun.console.line
    copier = None
    if lease is not None:
        copier = Copier(
            begun.store,
            mirror,
            section,
            attempt=lease.attempt,
            job_toml=dump_job(begun.job),
            start=start.step if start.checkpoint else -1,
            may_commit=lease.refuse_if_lost,
        )

    def take_over() -> None:
        assert copier is not None, "it is there on the first rank"
        try:
            copier.start()
        except MirrorError as error:
            if section.on_failure == "stop" or start.checkpoint is None or start.keeps_until is not None:
                copier.close()
                raise
            say(f"{error}; training goes on, and it is tried again after the next save")

    slowly_from_first_rank(take_over, begun.peers.sign)
    return Mirroring(
        copier,
        section,
        begun.peers.sign,
        say,
        begun.directory.write_event,
        lambda seconds: deadline.must_hold(seconds, say) if deadline else None,
    )
