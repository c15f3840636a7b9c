"""Copying committed checkpoints to the mirror while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, Queue, SimpleQueue

import attrs

from forge_core.checkpoint.manifest import DamagedError, Manifest, read_manifest
from forge_core.checkpoint.store import CheckpointStore, superfluous
from forge_core.config.sections import CheckpointSection
from forge_core.errors import ForgeError, MirrorError
from forge_plugins_mirror.mirror import Mirror


@attrs.frozen
class Copied:
    """How a copy has ended."""

    step: int
    """Of the checkpoint; the newest one if it is the mirror as a whole that has failed."""
    error: ForgeError | None
    n_bytes: int = 0
    seconds: float = 0.0


class Uploader:
    """On rank 0. One thing at a time, in a thread of its own, in the order in which it was asked for.

    Args:
        attempt: of this run; another one that takes the mirror over later has another one.
        job_toml: for the mirror, of this start.
        start: the step from which this start goes on, -1 if afresh. Later checkpoints at the mirror are put aside.
        may_commit: called before anything at the mirror changes; what it raises prevents that.
    """

    def __init__(
        self,
        store: CheckpointStore,
        mirror: Mirror,
        section: CheckpointSection,
        *,
        attempt: str,
        job_toml: str,
        start: int,
        may_commit: Callable[[], None],
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._section = section.at_mirror()
        self._take_over: Callable[[], None] = lambda: mirror.take_over(attempt[:12], job_toml, start)
        self._may_commit = may_commit
        self._has_taken_over = False
        self._there: Mapping[int, Manifest] = {}
        self._put_aside_after: int | None = None
        self._copying: int | None = None
        self._is_closed = False
        self._work: Queue[int | None] = Queue()
        """Steps after which checkpoints are to be put aside; ``None``: look what there is to copy."""
        self._outcomes: SimpleQueue[Copied] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="forge-mirror", daemon=True)

    def start(self) -> None:
        """Take the mirror over, and copy what earlier attempts have not.

        Raises:
            MirrorError: it cannot be taken over. It is tried again whenever there is something to copy.
        """
        self._thread.start()
        try:
            self._take_the_mirror_over()
        finally:
            self.look()

    def look(self) -> None:
        """See in the background whether there is something to copy, after a checkpoint has been committed."""
        self._work.put(None)

    def put_aside(self, after: int) -> None:
        """The run has gone back to the checkpoint of ``after``: later ones shall not be found at the mirror."""
        self._work.put(after)

    @property
    def is_busy(self) -> bool:
        """Return whether something that was asked for has not ended yet."""
        return self._work.unfinished_tasks > 0

    def outcomes(self) -> list[Copied]:
        """What has ended since this was last asked."""
        found = []
        while True:
            try:
                found.append(self._outcomes.get_nowait())
            except Empty:
                return found

    @property
    def copying(self) -> int | None:
        """The step whose checkpoint is being copied."""
        return self._copying

    def needed(self) -> set[int]:
        """Steps of the checkpoints here that are still to be copied."""
        return {*self._to_copy()} | ({self._copying} if self._copying is not None else set())

    def close(self) -> None:
        """Not to wait for: what is half copied is of no use to anybody, and the next start begins again."""
        self._is_closed = True
        self._work.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._is_closed:
            after = self._work.get()
            if after is not None:
                self._put_aside_after = after if self._put_aside_after is None else min(after, self._put_aside_after)
            try:
                if not self._is_closed:
                    self._bring_up_to_date()
            except ForgeError as error:
                self._outcomes.put(Copied(self._newest(), error))
            except Exception as error:  # noqa: BLE001 - reported where training can hear it
                self._outcomes.put(Copied(self._newest(), MirrorError(f"{type(error).__name__}: {error}")))
            self._work.task_done()

    def _newest(self) -> int:
        return max(self._store.steps(), default=0)

    def _bring_up_to_date(self) -> None:
        """The newest first; one that fails is left for the next time."""
        self._take_the_mirror_over()
        if (after := self._put_aside_after) is not None:
            self._may_commit()
            self._mirror.put_aside(after)
            self._there = {step: found for step, found in self._there.items() if step <= after}
            self._put_aside_after = None
        failed: set[int] = set()
        while steps := [step for step in self._to_copy() if step not in failed]:
            self._copying = steps[-1]
            copied = self._copy(steps[-1])
            self._copying = None
            if self._is_closed:
                return
            if copied is not None:
                self._outcomes.put(copied)
            if copied is None or copied.error is not None:
                failed.add(steps[-1])
        dropped = superfluous([(step, found.metrics) for step, found in self._there.items()], self._section)
        if dropped:
            self._may_commit()
            self._there = {step: found for step, found in self._there.items() if step not in dropped}
            self._mirror.remove(dropped)

    def _take_the_mirror_over(self) -> None:
        if self._has_taken_over:
            return
        self._may_commit()
        self._take_over()
        found = self._mirror.checkpoints()
        self._there = {step: one for step, one in found.items() if isinstance(one, Manifest)}
        self._has_taken_over = True

    def _to_copy(self) -> list[int]:
        """Steps, in ascending order, of what is here and not there, unless it would be removed from there at once."""
        here: dict[int, Manifest] = {}
        for step in self._store.steps():
            try:
                here[step] = read_manifest(self._store.folder(step))
            except DamagedError:
                continue
        all_steps = {**self._there, **here}
        dropped = superfluous([(step, found.metrics) for step, found in all_steps.items()], self._section)
        return [step for step, found in here.items() if self._there.get(step) != found and step not in dropped]

    def _copy(self, step: int) -> Copied | None:
        """``None`` if it is not here any more."""
        started = time.perf_counter()
        error: ForgeError
        try:
            manifest = self._mirror.copy(self._store.folder(step), self._refuse_if_closed)
        except ForgeError as caught:
            error = caught
        except DamagedError as caught:
            error = MirrorError(f"cannot copy {self._store.folder(step).name} to {self._mirror.url}: {caught}")
        else:
            self._there = {**self._there, step: manifest}
            return Copied(step, None, manifest.n_bytes, time.perf_counter() - started)
        return Copied(step, error) if self._store.folder(step).is_dir() else None

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise MirrorError("the run has ended")
        self._may_commit()
