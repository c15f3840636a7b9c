"""The mirror of a run's checkpoints while it trains: copied to from the first rank, without anybody waiting."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forge_core.checkpoint.uploader import Copied, Copier
from forge_core.config.sections import CheckpointSection
from forge_core.distributed.collective_errors import from_first_rank, on_all_ranks
from forge_core.errors import ForgeError, LeaseLostError, MirrorError


class Mirroring:
    """All ranks call the same methods at the same steps.

    Args:
        copier: on the first rank, started; ``None`` on the others.
        sign: called once a second while ranks wait.
        report: prints a line on the first rank.
        write_event: of ``events.jsonl``.
        copied: told how many seconds a checkpoint took.
    """

    def __init__(
        self,
        copier: Copier | None,
        section: CheckpointSection,
        sign: Callable[[], None],
        report: Callable[[str], None],
        write_event: Callable[..., None],
        copied: Callable[[float], None],
    ) -> None:
        self._copier = copier
        self._section = section
        self._sign = sign
        self._report = report
        self._write_event = write_event
        self._copied = copied
        self._failure: ForgeError | None = None
        self._has_failed = False
        self._is_last_try = False

    def saved(self) -> None:
        """There is another checkpoint to copy, and those that could not be copied before are tried again."""
        if self._copier is not None:
            self._copier.look()

    def put_aside(self, after: int) -> None:
        """The run has gone back to the checkpoint of ``after``."""
        if self._copier is not None:
            self._copier.put_aside(after)

    def removable(self, steps: Sequence[int], sizes: Mapping[int, int], folder: Path) -> list[int]:
        """On the first rank: those of ``steps``, none of which is kept for itself, that may be removed here. What has
        not been copied stays, unless the next checkpoint would have no room; then the oldest go.

        Args:
            sizes: bytes of each checkpoint that is here.
            folder: where they are.
        """
        assert self._copier is not None, "it is there on the first rank"
        needed = self._copier.needed()
        gone = [step for step in steps if step not in needed]
        room = shutil.disk_usage(folder).free + sum(sizes[step] for step in gone)
        for step in steps:
            if step in needed and step != self._copier.copying and room < sizes[max(sizes)]:
                gone.append(step)
                room += sizes[step]
                self._write_event("mirror_skipped", step=step)
                self._report(
                    f"the checkpoint of step {step} is removed before it could be copied to checkpoint.mirror: there "
                    f"would be no room in {folder} for the next one"
                )
        return sorted(gone)

    def look(self) -> None:
        """Tell what has been copied meanwhile."""
        for outcome in self._copier.outcomes() if self._copier is not None else ():
            self._take_note(outcome)

    def refuse_if_failed(self) -> None:
        """Raises the error of a copy that has failed, if the run is not to go on without it."""
        self.look()

        def refuse() -> None:
            if self._failure is not None:
                raise self._failure

        on_all_ranks(refuse)

    def finish(self) -> None:
        """At the end of the run: wait for what is being copied, and try once more what could not be.

        Raises:
            ForgeError: as ``refuse_if_failed``.
        """
        deadline = time.monotonic() + self._section.timeout
        self._wait(deadline)
        if self._has_failed:
            self._has_failed, self._failure = False, None
            self.saved()
        self._is_last_try = True
        self._wait(deadline)
        self.refuse_if_failed()

    def close(self) -> None:
        """Also after a failure: nothing is waited for."""
        if self._copier is not None:
            self._copier.close()
            self.look()

    def _wait(self, deadline: float) -> None:
        while from_first_rank(lambda: self._is_busy_for(1.0, deadline)):
            self._sign()
        self.look()
        if self._copier is not None and self._copier.is_busy:
            sentence = f"copying to the mirror takes longer than checkpoint.timeout = {self._section.timeout:g} s"
            self._take_note(Copied(max(self._copier.needed(), default=0), MirrorError(sentence)))

    def _is_busy_for(self, seconds: float, deadline: float) -> bool:
        """On the first rank: wait so long at most."""
        assert self._copier is not None, "it is there on the first rank"
        until = min(time.monotonic() + seconds, deadline)
        while self._copier.is_busy and time.monotonic() < until:
            time.sleep(0.02)
        return self._copier.is_busy and time.monotonic() < deadline

    def _take_note(self, outcome: Copied) -> None:
        if outcome.error is None:
            self._write_event("mirrored", step=outcome.step, seconds=outcome.seconds, bytes=outcome.n_bytes)
            self._copied(outcome.seconds)
            return
        self._has_failed = True
        self._write_event("mirror_failed", step=outcome.step, error=str(outcome.error))
        if self._section.on_failure == "stop" or isinstance(outcome.error, LeaseLostError):
            self._failure = outcome.error
        elif self._is_last_try:
            self._report(f"{outcome.error}; the same command tries it again")
        else:
            self._report(f"{outcome.error}; training goes on, and it is tried again after the next save")
