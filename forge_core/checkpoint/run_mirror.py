"""The mirror of a run as the rest of the core sees it: none at all, or a component whose failures obey the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import attrs

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.checkpoint_mirror import CheckpointMirror, MirrorContext, MirrorStart
from forge_core.contracts.component_ref import ComponentRef
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.errors import ForgeError, LeaseLostError, MirrorError, retelling

if TYPE_CHECKING:
    from forge_core.checkpoint.saver import Snapshot
    from forge_core.checkpoint.store import Checkpoint

P = ParamSpec("P")
T = TypeVar("T")


class NoMirror(CheckpointMirror):
    """A run whose checkpoints are in one place. All ranks call the same methods at the same steps, but for
    ``may_remove``."""

    def steps(self, here: Sequence[int]) -> list[int]:
        """List the steps of the checkpoints at the mirror.

        Args:
            here: steps whose checkpoints need not be fetched.

        Raises:
            MirrorError: it cannot be reached, and nothing is known of a run that may be there.
        """
        return []

    def take_over(self, start: MirrorStart, copied: Callable[[float], None]) -> None:
        """Begin to write to the mirror.

        Args:
            start: its ``copied`` and ``failed`` are set here.
            copied: told how many seconds a checkpoint took.

        Raises:
            MirrorError: it cannot be written to, and the run is not to start without it.
        """

    def refuse_if_failed(self) -> None:
        """Raise the error of a copy that has failed, if the run is not to go on without it."""

    def finish_run(self) -> None:
        """Wait for what is being copied, at the end of the run, and try once more what could not be.

        Raises:
            ForgeError: as ``refuse_if_failed``.
        """


class RunMirror(NoMirror):
    """A mirror component whose failures are told with its name and obey ``checkpoint.on_failure``.

    Args:
        words: the component as messages name it.
        provider: its distribution.
    """

    def __init__(self, mirror: CheckpointMirror, context: MirrorContext, words: str, provider: str) -> None:
        self._mirror = mirror
        self._context = context
        self._words, self._provider = words, provider
        self._write_event: Callable[..., None] = lambda *_, **__: None
        self._copied: Callable[[float], None] = lambda seconds: None
        self._failure: ForgeError | None = None
        self._is_last_try = False
        self.place = mirror.place

    def steps(self, here: Sequence[int]) -> list[int]:
        def available() -> list[int]:
            return [*self._mirror.available()]

        try:
            return self._call(available)
        except MirrorError as error:
            if self._context.section.on_failure == "stop" or not here:
                raise
            self._context.say(f"{error}; going by the checkpoints that are here")
            return []

    def last_job(self) -> str | None:
        try:
            return self._call(self._mirror.last_job)
        except MirrorError:
            return None  # `steps` says so, and decides

    def open(self, step: int) -> Checkpoint | None:
        return self._call(self._mirror.open, step)

    def fetch(self, step: int, folder: Path) -> str | None:
        return self._call(self._mirror.fetch, step, folder)

    def take_over(self, start: MirrorStart, copied: Callable[[float], None]) -> None:
        self._write_event, self._copied = start.write_event, copied
        start = attrs.evolve(start, copied=self._note_copy, failed=self._note_failure)
        try:
            self._call(self._mirror.begin, start)
        except MirrorError as error:
            if not start.may_start_without:
                self._call(self._mirror.close)
                raise
            self._context.say(f"{error}; training goes on, and it is tried again after the next save")

    def saved(self, path: Path) -> None:
        self._try(None, self._mirror.saved, path)

    def wants(self, step: int) -> bool:
        return self._try(False, self._mirror.wants, step)

    def keep(self, snapshot: Snapshot) -> None:
        self._try(None, self._mirror.keep, snapshot)

    def wait_until_copied(self) -> None:
        self._try(None, self._mirror.wait_until_copied)

    def look(self) -> None:
        self._try(None, self._mirror.look)

    def may_remove(self, steps: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
        def may_remove() -> list[int]:
            return [step for step in self._mirror.may_remove(steps, sizes) if step in steps]

        return self._try([], may_remove)  # if it fails, what may not have been copied stays

    def rolled_back(self, to: int) -> None:
        self._try(None, self._mirror.rolled_back, to)

    def refuse_if_failed(self) -> None:
        self.look()

        def refuse() -> None:
            if self._failure is not None:
                raise self._failure

        run_on_all_ranks(refuse)

    def finish_run(self) -> None:
        deadline = time.monotonic() + self._context.section.timeout
        self._finish_by(deadline)
        before, self._failure = self._failure, None
        if not self._try(False, self._mirror.try_again):
            self._failure = self._failure or before
        self._is_last_try = True
        self._finish_by(deadline)
        self.refuse_if_failed()

    def close(self) -> None:
        self._try(None, self._mirror.close)
        self.look()

    def _finish_by(self, deadline: float) -> None:
        self._try(None, self._mirror.finish, max(0.0, deadline - time.monotonic()))
        self.look()

    def _note_copy(self, step: int, n_bytes: int, seconds: float) -> None:
        self._write_event("mirrored", step=step, seconds=seconds, bytes=n_bytes)
        self._copied(seconds)

    def _note_failure(self, step: int, error: Exception) -> None:
        own = error if isinstance(error, ForgeError) else MirrorError(f"{type(error).__name__}: {error}")
        self._write_event("mirror_failed", step=step, error=str(own))
        if self._context.section.on_failure == "stop" or isinstance(own, LeaseLostError):
            self._failure = own
        elif self._is_last_try:
            self._context.say(f"{own}; the same command tries it again")
        else:
            self._context.say(f"{own}; training goes on, and it is tried again after the next save")

    def _call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        what = f"{self._words} fails in {method.__name__}"
        return _named(what, self._provider, lambda: method(*args, **kwargs))

    def _try(self, instead: T, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Same as ``_call``; an error is noted, since training may go on, and other ranks wait for this one."""
        try:
            return self._call(method, *args, **kwargs)
        except ForgeError as error:
            self._note_failure(self._newest(), error)
            return instead

    def _newest(self) -> int:
        steps = (path.name.removeprefix("step_") for path in self._context.folder.glob("step_*"))
        return max((int(step) for step in steps if step.isdecimal()), default=0)


def mirror_of(use: ComponentRef, context: MirrorContext, build: ComponentBuilder) -> RunMirror:
    """Build the mirror that a job chooses, on all ranks."""
    words, run_on_rank0 = build.words_for(use), context.run_on_rank0

    def named_on_rank0(work: Callable[[], T]) -> T:
        return run_on_rank0(lambda: _named(f"{words} fails", use.provider, work))

    context = attrs.evolve(context, run_on_rank0=named_on_rank0)
    return RunMirror(build(use, context=context), context, words, use.provider)


def _named(what: str, provider: str, work: Callable[[], T]) -> T:
    """Do ``work``. Errors that are none of Forge's become a sentence that names the component."""
    with retelling(lambda why: MirrorError(f"checkpoint.mirror: {what}: {why}. This is a bug in {provider}.")):
        return work()
