"""The mirror of a run's checkpoints while it trains: what is asked of the thread that copies, and what it has done."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_core.contracts.checkpoint_mirror import MirrorContext, MirrorStart
from forge_core.errors import MirrorError
from forge_plugins_mirror.uploader import Copied, Uploader


class Mirroring:
    """All ranks call the same methods at the same steps.

    Args:
        copier: on rank 0; ``None`` on the others.
    """

    def __init__(self, copier: Uploader | None, context: MirrorContext, start: MirrorStart) -> None:
        self._copier = copier
        self._context = context
        self._start = start
        self._has_failed = False

    def saved(self) -> None:
        """There is another checkpoint to copy, and the ones that could not be copied before are tried again."""
        if self._copier is not None:
            self._copier.look()

    def put_aside(self, after: int) -> None:
        """The run has gone back to the checkpoint of ``after``."""
        if self._copier is not None:
            self._copier.put_aside(after)

    def removable(self, steps: Sequence[int], sizes: Mapping[int, int], folder: Path) -> list[int]:
        """On rank 0: those of ``steps``, none of which is kept for itself, that may be removed here. What has
        not been copied stays, unless the next checkpoint would have no room; then the oldest go.

        Args:
            sizes: bytes of each checkpoint that is here.
            folder: where they are.
        """
        assert self._copier is not None, "it is there on rank 0"
        needed = self._copier.needed()
        gone = [step for step in steps if step not in needed]
        room = shutil.disk_usage(folder).free + sum(sizes[step] for step in gone)
        for step in steps:
            if step in needed and step != self._copier.copying and room < sizes[max(sizes)]:
                gone.append(step)
                room += sizes[step]
                self._start.write_event("mirror_skipped", step=step)
                self._context.say(
                    f"the checkpoint of step {step} is removed before it could be copied to checkpoint.mirror: there "
                    f"would be no room in {folder} for the next one"
                )
        return sorted(gone)

    def look(self) -> None:
        """Tell what has been copied meanwhile."""
        for outcome in self._copier.outcomes() if self._copier is not None else ():
            self._take_note(outcome)

    def wait(self, seconds: float) -> None:
        """For what is being copied, so long at most."""
        deadline = time.monotonic() + seconds
        self._context.run_on_rank0(lambda: self._wait_until(deadline))
        self.look()
        if self._copier is not None and self._copier.is_busy:
            timeout = self._context.section.timeout
            error = MirrorError(f"copying to the mirror takes longer than checkpoint.timeout = {timeout:g} s")
            self._take_note(Copied(max(self._copier.needed(), default=0), error))

    def try_again(self) -> None:
        """Begin to copy once more what could not be."""
        if self._has_failed:
            self._has_failed = False
            self.saved()

    def close(self) -> None:
        """Also after a failure: nothing is waited for."""
        if self._copier is not None:
            self._copier.close()

    def _wait_until(self, deadline: float) -> None:
        assert self._copier is not None, "it is there on rank 0"
        while self._copier.is_busy and time.monotonic() < deadline:
            time.sleep(0.02)

    def _take_note(self, outcome: Copied) -> None:
        if outcome.error is None:
            self._start.copied(outcome.step, outcome.n_bytes, outcome.seconds)
        else:
            self._has_failed = True
            self._start.failed(outcome.step, outcome.error)
