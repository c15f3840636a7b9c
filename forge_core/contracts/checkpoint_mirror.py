"""Checkpoint mirrors: a second place for the checkpoints of a run, which may outlive the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

if TYPE_CHECKING:
    from forge_core.checkpoint.manifest import DamagedError, Manifest
    from forge_core.checkpoint.saver import Snapshot
    from forge_core.checkpoint.store import Checkpoint
    from forge_core.config.sections import CheckpointSection

T = TypeVar("T")

WRITER = "writer.json"
"""A file in the folder of a run at a mirror that looks like the directory of a run. ``forge checkpoint`` knows by it
that ``mirror_keep_last`` decides there."""


class RunOnRank0(Protocol):
    """A function that calls another one on rank 0."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Call ``work`` on rank 0 while the others wait, however long it takes. All ranks call it together, and all get
        what ``work`` returns or end with what it raises."""


@attrs.frozen(kw_only=True)
class MirrorContext:
    """Facts about a run, and functions of it, that are known before anything is written."""

    run_name: str
    """The place of the run in its mirror. Empty if the configured place is the run's own, as ``forge checkpoint list
    URL`` has it."""
    folder: Path
    """The folder of the run's own checkpoints, ``<run.dir>/<run.name>/checkpoints``."""
    section: CheckpointSection
    """The job's ``[checkpoint]``. ``section.at_mirror()`` says which checkpoints a mirror keeps."""
    rank: int = 0
    say: Callable[[str], None]
    """Print a line on rank 0."""
    run_on_rank0: RunOnRank0


@attrs.frozen(kw_only=True)
class MirrorStart:
    """Facts about a start of a run that writes, and functions for it. They are there from ``begin`` to ``close``."""

    attempt: str
    """Name of this start; no other start has it."""
    job_toml: str
    """The resolved job, for ``last_job``."""
    step: int
    """The step of the checkpoint from which the run goes on; -1 if it starts afresh. Later checkpoints at the mirror
    belong to work that is given up."""
    n_bytes: int = 0
    """An estimate: what each rank adds to a checkpoint, on average. 0 where nothing will be trained."""
    may_start_without: bool
    """The run starts although the mirror cannot be written to. Otherwise ``begin`` raises."""
    refuse_if_lost: Callable[[], None]
    """Call it before something at the mirror changes.

    Raises:
        LeaseLostError: another attempt trains this run now; nothing more is to be written.
    """
    write_event: Callable[..., None]
    """Write a line of ``events.jsonl``: its name, and keys with values."""
    copied: Callable[[int, int, float], None] = lambda step, n_bytes, seconds: None
    """Tell that a checkpoint is at the mirror: its step, its bytes, and how many seconds it took. On rank 0, in the
    thread that has called the mirror."""
    failed: Callable[[int, Exception], None] = lambda step, error: None
    """Tell that a checkpoint could not be copied: its step, and why. ``checkpoint.on_failure`` decides what follows.
    On rank 0, in the thread that has called the mirror."""


class CheckpointMirror:
    """Base class. All ranks have one, and all call the same methods at the same steps, but for ``may_remove``. Override
    what you need; as it is, it holds nothing.

    A method that writes or reads a file does so on rank 0: ``if context.rank == 0``, or ``context.run_on_rank0`` where
    the other ranks need the answer. An error of a method is told with the component and its distribution; from
    ``begin`` to ``try_again`` it counts as a checkpoint that could not be copied.
    """

    place: str = ""
    """Where it is, for messages."""

    def available(self) -> Mapping[int, Manifest | DamagedError]:
        """List the checkpoints at the mirror, by step in ascending order: the manifest of each, or its damage. The same
        on all ranks.

        Raises:
            MirrorError: it cannot be reached.
        """
        return {}

    def last_job(self) -> str | None:
        """Return the ``job_toml`` of the run's last start; ``None`` before the first. The same on all ranks.

        Raises:
            MirrorError: it cannot be reached.
        """
        return None

    def open(self, step: int) -> Checkpoint | None:
        """Open a checkpoint that ``available`` has listed last, where it lies. It is whole, and each rank can read it.
        ``None``: it has to be fetched.

        Raises:
            MirrorError: it cannot be reached.
        """
        return None

    def fetch(self, step: int, folder: Path) -> str | None:
        """Copy a checkpoint that ``available`` has listed last to ``folder``, which is not there yet, and flush it.
        Return its damage, or ``None``. The same on all ranks.

        Raises:
            MirrorError: the mirror fails.
            ConfigError: there is no room in ``folder``, for instance.
        """
        raise NotImplementedError

    def problem(self, step: int, *, reads: bool) -> str | None:
        """Find the damage of a checkpoint that ``available`` has listed last; ``None`` if it is whole.

        Args:
            reads: down to the last bit, as ``forge checkpoint verify --mirror`` has it; otherwise as far as names and
                sizes tell.

        Raises:
            MirrorError: it cannot be reached.
        """
        return None

    def begin(self, start: MirrorStart) -> None:
        """Take the mirror over from earlier attempts, and put checkpoints of steps above ``start.step`` aside. What an
        earlier start could not copy is copied now or after the next save.

        Raises:
            MirrorError: it cannot be written to.
        """

    def saved(self, path: Path) -> None:
        """Copy the checkpoint in ``path``, which has just been committed, and what could not be copied before. Training
        waits for this method: what takes long belongs into a thread."""

    def wants(self, step: int) -> bool:
        """Return whether to keep a checkpoint of ``step`` beside the checkpoints on disk. The same on all ranks.
        Called after every step but the last."""
        return False

    def keep(self, snapshot: Snapshot) -> None:
        """Keep all that goes into a checkpoint of the step that ``wants`` was asked for, if one can go on from it.
        Its tensors are the ones that are trained, which the next step changes. Training waits for this method."""

    def wait_until_copied(self) -> None:
        """Wait until tensors that were taken after the last step may change."""

    def look(self) -> None:
        """Hand what a thread has done to ``start.copied`` and ``start.failed``. Called after every step."""

    def may_remove(self, steps: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
        """Choose the steps that may be removed in the run's folder: not one that is still to be copied. Called on
        rank 0 alone.

        Args:
            steps: which the run does not keep for itself.
            sizes: bytes of each checkpoint in the folder.
        """
        return [*steps]

    def rolled_back(self, to: int) -> None:
        """Put the checkpoints of steps above ``to`` aside: the run has gone back, and will save these steps again."""

    def finish(self, seconds: float) -> None:
        """Wait for what is being copied, so long at most. Use ``context.run_on_rank0``. Called twice at the end of the
        run, the second time after ``try_again``."""

    def try_again(self) -> bool:
        """Begin to copy once more what could not be copied. Return whether this mirror does; otherwise what has failed
        remains so."""
        return False

    def close(self) -> None:
        """Let go of everything, also after a failure. Nothing is waited for."""


class MirrorFactory(Protocol):
    """The signature of the factory that a description names.

    The config class may have a method ``within(name)``: the same place, one folder further down. Without it, a run of
    several replicas cannot have the mirror, since each replica is a run of its own there.
    """

    def __call__(self, config: Any, /, *, context: MirrorContext) -> CheckpointMirror:
        """Build the mirror of one run, on every rank. It asks nothing of the mirror yet.

        Raises:
            MirrorError: there can be no mirror at the configured place.
        """
