"""Failing together: what one rank finds wrong, all ranks end with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from forge_core.errors import ExitCode, ForgeError, LostPeerError

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T]) -> T:
    """Do ``work`` on every rank, and fail on every rank if it fails on one, with all their sentences.

    Raises:
        ForgeError: on the first rank, with what each rank had to say; on the others with an empty message.
    """
    error: ForgeError | None = None
    done: list[T] = []
    try:
        done.append(work())
    except ForgeError as caught:
        error = caught
    if dist.get_world_size() > 1:
        said: list[tuple[str, ExitCode] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if error is None else (str(error), error.exit_code))
        failed = [(rank, *entry) for rank, entry in enumerate(said) if entry is not None]
        if failed:
            joined = ForgeError("" if dist.get_rank() else _joined([(rank, message) for rank, message, _ in failed]))
            joined.exit_code = failed[0][2]
            raise joined from error
    if error is not None:
        raise error
    return done[0]


def _joined(said: Sequence[tuple[int, str]]) -> str:
    """One line where all say the same."""
    messages = {message for _, message in said}
    if len(messages) == 1:
        return said[0][1]
    return "\n".join(f"[rank {rank}] {message}" for rank, message in said)


@contextmanager
def lost_peers_named() -> Iterator[None]:
    """Turn what a collective raises when another rank is gone into a sentence and its exit code."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors too
        gone = ("Connection closed by peer", "Connection reset by peer", "timed out", "Timed out waiting")
        if dist.get_world_size() > 1 and any(sign in str(error) for sign in gone):
            raise LostPeerError(f"rank {dist.get_rank()} lost another rank: {error}") from error
        raise
