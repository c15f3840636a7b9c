"""Saving: the contents of checkpoints, how a save ends, and which checkpoints stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from forge_core.checkpoint.manifest import DamagedError, read_manifest
from forge_core.checkpoint.retention import superfluous
from forge_core.checkpoint.run_mirror import NoMirror
from forge_core.checkpoint.saver import Saved, Saver, Snapshot
from forge_core.checkpoint.state_dict import optimizer_state
from forge_core.checkpoint.store import CheckpointStore
from forge_core.checkpoint.upgrading import module_versions, optimizer_version
from forge_core.config.sections import Job
from forge_core.contracts.callback import Callback
from forge_core.contracts.data_source import DataSource
from forge_core.distributed.mesh import Mesh
from forge_core.distributed.peer_monitor import PeerMonitor
from forge_core.errors import LeaseLostError
from forge_core.job import dump_job
from forge_core.train.build import BuiltModel
from forge_core.train.component_state import states_of

TRIED_AGAIN_AFTER = (2.0, 5.0, 10.0)
"""Seconds to wait before the last save of a run is tried again, each time that it has failed."""


@attrs.frozen
class Contents:
    """Where everything that affects the future is found."""

    job: Job
    mesh: Mesh
    model: BuiltModel
    optimizer: torch.optim.Optimizer
    source: DataSource
    vocab_size: int
    callbacks: tuple[tuple[str, Callback], ...]
    tracker_states: Callable[[], Mapping[str, Any]]
    versions: Mapping[str, str]

    def snapshot(self, step: int, tokens: int, progress: Mapping[str, Any], metrics: Mapping[str, float]) -> Snapshot:
        """Of now. Its tensors are the ones that are trained; everything else has been copied."""
        tensors, own_facts = optimizer_state(self.optimizer, self.model.parameters)
        facts = self.mesh.gather_over("pp", own_facts)
        modules = self.mesh.gather_over("pp", module_versions(self.model.parts))
        job_toml, tokenizer = dump_job(self.job), self.source.tokenizer

        def write_more(folder: Path) -> Mapping[str, Any]:
            (folder / "job.toml").write_text(job_toml)
            if tokenizer is None:
                return {}
            (folder / "tokenizer").mkdir()
            return {"tokenizer": dict(tokenizer.save(folder / "tokenizer"))}

        return Snapshot(
            step=step,
            tokens=tokens,
            tensors={**self.model.tensors(), **tensors},
            state={
                "step": step,
                "tokens": tokens,
                **progress,
                "data_fingerprint": self.source.fingerprint,
                "vocab_size": self.vocab_size,
                "optimizer": {
                    "values": {name: value for stage in facts for name, value in stage["values"].items()},
                    "on_host": sorted({slot for stage in facts for slot in stage["on_host"]}),
                    "version": optimizer_version(self.optimizer),
                },
                "modules": {name: version for stage in modules for name, version in stage.items()},
                "callbacks": states_of(self.callbacks),
                "trackers": self.tracker_states(),
            },
            mesh=self.mesh.degrees,
            versions=self.versions,
            metrics=metrics,
            write_more=write_more,
        )


class Saving:
    """One checkpoint at a time. All ranks call the same methods at the same steps.

    Args:
        mirror: copies what is committed.
        report: prints a line on rank 0.
        ended: told how every save has ended.
        committed: told of every checkpoint that is there, on all ranks; not after the run has failed.
    """

    def __init__(
        self,
        contents: Contents,
        saver: Saver,
        peers: PeerMonitor,
        store: CheckpointStore,
        mirror: NoMirror,
        report: Callable[[str], None],
        ended: Callable[[Saved], None],
        committed: Callable[[Saved], None],
    ) -> None:
        self._contents = contents
        self._saver = saver
        self._peers = peers
        self._store = store
        self._mirror = mirror
        self._report = report
        self._ended = ended
        self._committed = committed
        self._begun_at: int | None = None
        self._snapshot: Callable[[], Snapshot] | None = None
        """Of the step of the last save, which must not be over yet."""

    @property
    def is_writing(self) -> bool:
        """On this rank."""
        return self._saver.is_writing

    def begin(
        self,
        step: int,
        tokens: int,
        progress: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        must_succeed: bool,
    ) -> None:
        """Save what is there now, after the save before it has ended.

        Args:
            progress: more that decides the future, as JSON values: where in the data, and what went wrong.
            must_succeed: this is the last save of the run. In the background, ``finish`` is told the same.

        Raises:
            ForgeError: this save, in the foreground, or the one before has failed, and the run cannot go on without it.
        """
        self.finish()
        self._mirror.refuse_if_failed()
        self._begun_at = step
        self._snapshot = partial(self._contents.snapshot, step, tokens, progress, metrics)
        with self._waiting():
            self._saver.save(self._snapshot())
        if not self._contents.job.checkpoint.background:
            self._finish(must_succeed)

    def wait_until_copied(self) -> None:
        """Before anything that is being saved changes."""
        self._saver.wait_until_copied()

    def look(self, step: int, *, is_written: bool) -> None:
        """Take note of a save that has ended.

        Args:
            is_written: whether all ranks have said so; they say it two steps late at most.
        """
        self._mirror.look()
        if is_written and self._begun_at is not None and step >= self._begun_at + 2:
            self.finish()

    def finish(self, *, must_succeed: bool = False) -> None:
        """Wait for the save that is under way, if there is one.

        Args:
            must_succeed: at the end of the run; the mirror is waited for, too.

        Raises:
            ForgeError: it has failed, and the run cannot go on without it.
        """
        self._finish(must_succeed)
        if must_succeed:
            with self._waiting():
                self._mirror.finish()

    def _finish(self, must_succeed: bool) -> None:
        with self._waiting():
            saved = self._saver.finish()
        self._begun_at = None
        if saved is None:
            return
        self._ended(saved)
        if must_succeed:
            saved = self._persist(saved)
        if saved.error is None:
            self._report(f"saved {saved.path.name}")
            self._committed(saved)
            self._mirror.saved(saved.path)
            self._prune(saved.step)
            return
        if (
            must_succeed
            or self._contents.job.checkpoint.on_failure == "stop"
            or isinstance(saved.error, LeaseLostError)
        ):
            raise saved.error
        self._report(f"saving step {saved.step} failed, training goes on: {saved.error}")

    def _persist(self, saved: Saved) -> Saved:
        """Try again what has failed: a disk that is full or away for a moment must not cost the last steps."""
        assert self._snapshot is not None, "a save has ended"
        for seconds in TRIED_AGAIN_AFTER:
            if saved.error is None or isinstance(saved.error, LeaseLostError):
                break
            self._report(f"saving step {saved.step} failed, it is tried again in {seconds:g} s: {saved.error}")
            with self._waiting():
                time.sleep(seconds)
                self._saver.save(self._snapshot())
                again = self._saver.finish()
            assert again is not None, "it has just been begun"
            saved = again
            self._ended(saved)
        return saved

    def close(self) -> None:
        """After a failure, too: what is being written is not cut off."""
        saved = self._saver.close()
        if saved is not None:
            self._ended(saved)
        self._mirror.close()

    def _waiting(self) -> AbstractContextManager[None]:
        """For files to be written, which may take longer than a step."""
        return self._peers.patient(self._contents.job.checkpoint.timeout)

    def _prune(self, newest: int) -> None:
        """Later ones than ``newest`` have been passed over when the run began: they are damaged, and would be counted
        in the place of whole ones."""
        if self._contents.mesh.rank > 0:
            return
        there = {}
        for step in self._store.steps():
            if step > newest:
                continue
            try:
                there[step] = read_manifest(self._store.folder(step))
            except DamagedError:
                continue  # not ours to judge by, nor to remove
        steps = superfluous([(step, found.metrics) for step, found in there.items()], self._contents.job.checkpoint)
        steps = self._mirror.may_remove(steps, {step: found.n_bytes for step, found in there.items()})
        try:
            self._store.begin_to_remove(steps)
        except OSError as error:
            self._report(f"could not remove checkpoints that are no longer kept: {error}")
