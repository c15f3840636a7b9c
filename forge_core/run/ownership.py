"""Ownership of a run's directory: the lease, the open directory, and its place at the mirror."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from forge_core.contracts.checkpoint_mirror import MirrorStart
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.errors import ConfigError
from forge_core.job import dump_job
from forge_core.run.lease import FILE_NAME, Lease, refuse_unless_shared
from forge_core.run.setup import Begun, RunSetup
from forge_core.run.time_limit import TimeLimit


@attrs.frozen
class Ownership:
    """From when a run's directory is first written to until the run ends, however it does."""

    attempt: str
    """The lease's, on every rank."""
    lease: Lease | None
    """On rank 0."""

    def refuse_if_lost(self) -> None:
        """Same as ``Lease.refuse_if_lost``; other ranks hear of it from the first one."""
        if self.lease is not None:
            self.lease.refuse_if_lost()


@contextmanager
def ownership(setup: RunSetup, environment: Mapping[str, Any], limit: TimeLimit, n_bytes: int) -> Iterator[Ownership]:
    """Take the run's directory over and open it, on all ranks.

    Args:
        environment: as ``describe_environment`` gives it, on rank 0.
        n_bytes: what this rank has of tensors that are saved.

    Raises:
        ConfigError: somebody else trains there, it cannot be written to, or has changed meanwhile.
        MirrorError: the mirror cannot be written to, and the run is not to start without it.
    """
    with _held(setup) as held:
        run_on_all_ranks(lambda: refuse_unless_shared(setup.directory.path, held.attempt))
        run_on_rank0(lambda: _open_directory(setup, environment))
        try:
            _begin_mirror(setup, held, limit, n_bytes // setup.mesh.degrees["dp_replicate"])
            yield held
        finally:
            setup.directory.close()


def complete(begun: Begun) -> None:
    """Do what a run that has all its steps could not do any more: copy to the mirror, and clear up, if it was killed
    while it ended."""
    if begun.job.checkpoint.mirror is None and not run_on_rank0(lambda: _is_left_untidy(begun)):
        return
    with _held(begun) as held:
        if held.lease is not None:
            begun.store.remove_unfinished()
        _begin_mirror(begun, held, None, 0)
        try:
            begun.mirror.finish_run()
        finally:
            begun.mirror.close()


def _is_left_untidy(begun: Begun) -> bool:
    """By an attempt that was killed, and it can be mended: a run that is only to be looked at is left alone."""
    path, store = begun.directory.path, begun.store
    untidy = (path / FILE_NAME).exists() or any(store.unfinished())
    return untidy and os.access(path, os.W_OK) and os.access(store.path, os.W_OK)


@contextmanager
def _held(begun: Begun) -> Iterator[Ownership]:
    lease = run_on_all_ranks(lambda: _lease(begun))
    try:
        yield Ownership(run_on_rank0(lambda: lease.attempt if lease else ""), lease)
    finally:
        if lease is not None:
            lease.give_back()


def _lease(begun: Begun) -> Lease | None:
    """On rank 0: from here on, this run's directory is written to."""
    if begun.mesh.rank > 0:
        return None
    try:
        return Lease(begun.directory.path, begun.console.line, begun.ended)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {begun.directory.path}: {error.strerror}") from error


def _open_directory(prepared: RunSetup, environment: Mapping[str, Any]) -> None:
    """On rank 0."""
    start, store = prepared.start, prepared.store
    if store.steps() != list(start.seen):
        raise ConfigError(f"{store.path} has changed while this run was being prepared; start it again")
    store.remove_unfinished()
    if start.keeps_until is not None and (aside := store.put_aside(start.keeps_until)):
        prepared.console.line(f"later checkpoints are now in {aside}")
    prepared.directory.open(prepared.job, environment, start.step)  # from here on, its job.toml says it is done


def _begin_mirror(begun: Begun, held: Ownership, limit: TimeLimit | None, n_bytes: int) -> None:
    """After the run's own directory: the mirror's ``job.toml`` says that both are done.

    Raises:
        MirrorError: as ``ownership``.
    """
    section, start, say = begun.job.checkpoint, begun.start, begun.console.line
    begun.mirror.take_over(
        MirrorStart(
            attempt=held.attempt,
            job_toml=dump_job(begun.job),
            step=start.step if start.checkpoint else -1,
            n_bytes=n_bytes,
            may_start_without=section.on_failure != "stop" and bool(start.checkpoint) and start.keeps_until is None,
            refuse_if_lost=held.refuse_if_lost,
            write_event=begun.directory.write_event,
        ),
        lambda seconds: limit.must_hold(seconds, say) if limit else None,
    )
