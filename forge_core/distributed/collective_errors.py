"""Failing together: what one rank finds wrong, all ranks end with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NoReturn, TypeVar, cast

import torch.distributed as dist

from forge_core import errors
from forge_core.distributed.dissemination import disseminate
from forge_core.errors import ExitCode, ForgeError, and_more

T = TypeVar("T")

_SHOWN = 10
"""Sentences of ranks that differ."""


def run_on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Do ``work`` on every rank, and fail on every rank if it fails on one, with all their sentences.

    Calls may be nested, and a rank may fail between two inner ones, which the others are in: they all end together.

    Args:
        group: over which they tell each other; it has all ranks.

    Raises:
        ForgeError: on rank 0, with what each rank had to say; on the others with an empty message. If it is one
            of the core's errors, it is of the same class on all ranks: what follows from it is decided alike.
    """
    if dist.get_world_size() == 1:
        return work()
    try:
        done = work()
    except Exception as error:
        if not (isinstance(error, ForgeError) and _is_on_all_ranks(error)):
            _tell(_for_others(error), group)
        raise
    _tell(None, group)
    return done


def any_rank(*flags: bool, group: dist.ProcessGroup | None = None) -> list[bool]:
    """Return for each of up to seven flags whether it is set on any rank. All ranks ask together.

    Raises:
        ForgeError: a rank has failed meanwhile in work that all of them do.
    """
    has_failed, *answers = disseminate(False, *flags, group=group)
    if has_failed:
        _fail_together(None, group)
    return answers


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in their order; they must be picklable. All ranks call it together."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _tell(error: ForgeError | None, group: dist.ProcessGroup | None = None, done: bool = True) -> bool:
    """Tell all ranks of a failure, or that this rank is ``done`` or not; return whether all are.

    Raises:
        ForgeError: one of them has failed.
    """
    has_failed, are_waiting = disseminate(error is not None, not done, group=group)
    if has_failed:
        _fail_together(error, group)
    return not are_waiting


def _fail_together(error: ForgeError | None, group: dist.ProcessGroup | None) -> NoReturn:
    """Raise on all ranks what was raised on some. They all know that it was."""
    own = None if error is None else (str(error), error.exit_code, type(error).__name__)
    failed = [(rank, *entry) for rank, entry in enumerate(gather(own, group)) if entry is not None]
    _, _, code, name = failed[0]
    joined = _class_named(name)("" if dist.get_rank() else _joined([(rank, message) for rank, message, _, _ in failed]))
    joined.exit_code, joined.is_on_all_ranks = code, True
    raise joined from error


def _is_on_all_ranks(error: BaseException | None) -> bool:
    """Return whether all ranks raise an error, or one that it was made of."""
    return error is not None and (getattr(error, "is_on_all_ranks", False) or _is_on_all_ranks(error.__cause__))


def run_on_rank0(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``work`` on rank 0, and return its result on all ranks: they may not see the same files at the same time.
    Where there is no process group, or one of a single rank, that is ``work()``.

    Args:
        group: over which they are told; it has all ranks.

    Raises:
        ForgeError: what ``work`` raised on rank 0; on the others of the same class, if it is one of the core's,
            with its exit code and an empty message.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    refusal: ForgeError | None = None
    outcome: list[tuple[T | None, ExitCode | None, str]] = [(None, None, "")]
    if dist.get_rank() == 0:
        try:
            outcome = [(work(), None, "")]
        except Exception as error:  # noqa: BLE001 - the others wait to be told
            refusal = _for_others(error)
            outcome = [(None, refusal.exit_code, type(refusal).__name__)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    value, code, name = outcome[0]
    if code is not None:
        refusal = refusal or _class_named(name)("")
        refusal.exit_code = code
        raise refusal
    return cast("T", value)


def run_slowly_on_rank0(work: Callable[[], T], beat: Callable[[], None]) -> T:
    """Same as ``run_on_rank0``, for work that takes longer than ranks wait for each other in a collective.

    Args:
        beat: called about once a second while they wait.
    """
    outcome: Future[T] = _begun(work) if dist.get_rank() == 0 else Future()
    while not run_on_rank0(lambda: bool(wait([outcome], timeout=1.0).done)):
        beat()
    return run_on_rank0(outcome.result)


def run_slowly_on_all_ranks(work: Callable[[], T], beat: Callable[[], None]) -> T:
    """Same as ``run_on_all_ranks``, for work that takes longer than ranks wait for each other in a collective.

    Args:
        beat: called about once a second while they wait.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    outcome = _begun(work)
    while not _tell(None, done=bool(wait([outcome], timeout=1.0).done)):
        beat()
    return run_on_all_ranks(outcome.result)


def _begun(work: Callable[[], T]) -> Future[T]:
    outcome: Future[T] = Future()

    def do() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=do, name="forge-slowly", daemon=True).start()
    return outcome


def _class_named(name: str) -> type[ForgeError]:
    """The core's class of errors of that name; of a plugin's, which this rank need not have, the base."""
    return cast("type[ForgeError]", getattr(errors, name, ForgeError))


def _for_others(cause: Exception) -> ForgeError:
    """The error itself, if it is meant for the user; else one that says it, with its notes."""
    if isinstance(cause, ForgeError):
        return cause
    error = ForgeError("\n".join((f"{type(cause).__name__}: {cause}", *getattr(cause, "__notes__", ()))))
    error.__cause__ = cause
    return error


def _joined(said: Sequence[tuple[int, str]]) -> str:
    """Each sentence once, without ranks where all who say anything say the same; the first ones of thousands."""
    ranks: dict[str, list[int]] = {}
    for rank, message in [one for one in said if one[1]] or said:
        ranks.setdefault(message, []).append(rank)
    lines = [f"[rank {own[0]}{and_more(len(own), 1)}] {message}" for message, own in ranks.items()]
    return next(iter(ranks)) if len(ranks) == 1 else "\n".join(lines[:_SHOWN]) + and_more(len(lines), _SHOWN, "\n")
