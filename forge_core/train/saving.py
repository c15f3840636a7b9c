"""Saving: when a checkpoint is saved and what is in it, how a save ends, and which checkpoints stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from forge_core.checkpoint.component_state import states_of, tensors_of
from forge_core.checkpoint.manifest import DamagedError, read_manifest
from forge_core.checkpoint.retention import is_due, superfluous
from forge_core.checkpoint.run_mirror import NoMirror
from forge_core.checkpoint.saver import Saved, Saver, Snapshot
from forge_core.checkpoint.state_dict import optimizer_state
from forge_core.checkpoint.store import CheckpointStore
from forge_core.checkpoint.upgrading import module_versions, optimizer_version
from forge_core.contracts.callback import Callback
from forge_core.distributed.consensus import Votes
from forge_core.distributed.mesh import DATA_AXES
from forge_core.errors import LeaseLostError
from forge_core.job import dump_job
from forge_core.train.build import Built
from forge_core.train.evaluation_weights import EvaluationWeights
from forge_core.train.metrics import Metrics
from forge_core.train.replication import Replicas
from forge_core.train.rollback import Rollback
from forge_core.train.run import Run

TRIED_AGAIN_AFTER = (2.0, 5.0, 10.0)
"""Seconds to wait before the last save of a run is tried again, each time that it has failed."""


@attrs.frozen(kw_only=True)
class Contents:
    """Where everything that affects the future is found."""

    run: Run
    built: Built
    rollback: Rollback
    vocab_size: int
    callbacks: Sequence[tuple[str, Callback]]
    evaluation_weights: EvaluationWeights
    tracker_states: Callable[[], Mapping[str, Any]]
    versions: Mapping[str, str]
    accumulation_asked_for: int
    """``train.grad_accumulation`` of the job, before ranks were counted; the next start looks whether it is as
    before."""

    def progress(self) -> dict[str, Any]:
        """Where in the data the run is, and what went wrong, as JSON values."""
        return {
            "position": self.run.loader.position,
            "left_out": self.run.loader.stream.left_out,
            **self._streams(),
            "anomalies": self.rollback.guard.state(),
            "rolling_back": self.rollback.state(),
            "accumulation_asked_for": self.accumulation_asked_for,
        }

    def _streams(self) -> dict[str, Any]:
        """The place of the run in each stream. All ranks ask, as each knows the streams that it reads."""
        loader, mesh = self.run.loader, self.run.mesh
        if (streams := loader.stream.streams) is None:
            return {}
        number = loader.stream.samples_read(loader.position)
        states = streams.states(number)
        for axis in DATA_AXES:
            states = {stream: state for known in mesh.gather_over(axis, states) for stream, state in known.items()}
        return {"streams": {"number": number, "states": [states[stream] for stream in range(streams.n_streams)]}}

    def snapshot(self, step: int, metrics: Mapping[str, float]) -> Snapshot:
        """Take a snapshot of now. Its tensors are the ones that are trained and evaluated; everything else is a
        copy."""
        job, mesh, source = self.run.job, self.run.mesh, self.run.loader.stream.source
        tokens = self.run.loader.position * job.train.seq_len
        tensors, own_facts = optimizer_state(self.built.optimizer, self.built.model.parameters)
        tensors |= {**tensors_of(self.callbacks), **self.evaluation_weights.to_save()}
        facts = mesh.gather_over("pp", own_facts)
        modules = mesh.gather_over("pp", module_versions(self.built.model.parts))
        job_toml, tokenizer = dump_job(job), source.tokenizer

        def write_more(folder: Path) -> Mapping[str, Any]:
            self.run.directory.sync()  # a run that is said to be saved has its history up to there
            (folder / "job.toml").write_text(job_toml)
            if tokenizer is None:
                return {}
            (folder / "tokenizer").mkdir()
            return {"tokenizer": dict(tokenizer.save(folder / "tokenizer"))}

        once = self.built.phases.always_frozen if job.checkpoint.frozen == "once" else ()
        return Snapshot(
            step=step,
            tokens=tokens,
            tensors={**self.built.model.tensors(), **tensors},
            state={
                "step": step,
                "tokens": tokens,
                **self.progress(),
                "data_fingerprint": source.fingerprint,
                "vocab_size": self.vocab_size,
                "optimizer": {
                    "values": {name: value for stage in facts for name, value in stage["values"].items()},
                    "on_host": sorted({slot for stage in facts for slot in stage["on_host"]}),
                    "version": optimizer_version(self.built.optimizer),
                },
                "modules": {name: version for stage in modules for name, version in stage.items()},
                "callbacks": states_of(self.callbacks),
                "trackers": self.tracker_states(),
            },
            mesh=mesh.degrees,
            versions=self.versions,
            metrics=metrics,
            write_more=write_more,
            frozen=frozenset(f"model.{name}" for name in once),
        )


@attrs.define(kw_only=True)
class Saving:
    """When a checkpoint is saved, and how its save ends: one at a time. All ranks call the same methods at the same
    steps."""

    run: Run
    contents: Contents
    saver: Saver
    store: CheckpointStore
    mirror: NoMirror
    """Copies what is committed."""
    metrics: Metrics
    replicas: Replicas
    """Number 0 writes what all of them have."""
    committed: Callable[[Saved], None]
    """Told of every checkpoint that is there, on all ranks."""
    saved_step: int
    """The step of the newest checkpoint, or at which a run without one begins."""
    _last: float = attrs.field(factory=time.monotonic, init=False)
    """The time of the last save, or of the start."""
    _is_put_off: bool = attrs.field(default=False, init=False)
    """A save waits for a good step."""
    _snapshot: Callable[[], Snapshot] | None = attrs.field(default=None, init=False)
    """Takes the snapshot of the last save once more, as long as its step is not over."""
    _begun_at: int | None = attrs.field(default=None, init=False)

    @property
    def is_writing(self) -> bool:
        """On this rank."""
        return self.saver.is_writing

    def save_first(self) -> None:
        """Save before the first step of a run that is not resumed, if it is asked for."""
        if is_due(0, self.run.job.checkpoint):
            self._save(0, {}, is_last=False)

    def ask_for_timely_save(self) -> None:
        """Request a save after ``checkpoint.minutes``, by rank 0's clock."""
        minutes = self.run.job.checkpoint.minutes
        if (
            minutes > 0
            and self.run.mesh.rank == 0
            and self.replicas.share.index == 0
            and time.monotonic() - self._last >= 60 * minutes
        ):
            self.run.requests.save_now = True

    def after_step(self, step: int, evaluated: Mapping[str, float], votes: Votes) -> None:
        """Finish the save that all ranks have written, and begin one if it is due or asked for.

        Args:
            evaluated: values of the evaluation after this step.

        Raises:
            ForgeError: a save has failed, and the run cannot go on without it.
        """
        self.mirror.look()
        if self._begun_at is not None and step >= self._begun_at + 2 and not votes.is_writing:  # told two steps late
            self.finish()
        is_last = votes.stop or step == self.run.job.train.steps
        if not is_last and self.mirror.wants(step) and self._may_save(step, is_last=False):
            self.mirror.keep(self.contents.snapshot(step, evaluated))
        is_regular = self.replicas.share.index == 0 and is_due(step, self.run.job.checkpoint)
        if votes.save or is_last or is_regular or self._is_put_off:
            self._save(step, evaluated, is_last=is_last)

    def save_between_steps(self, step: int) -> None:
        """Save the end of a run that is told to stop while it waits for the next step, if a step is not saved yet."""
        self.finish()
        if step > self.saved_step:
            self._save(step, {}, is_last=True)

    def _save(self, step: int, evaluated: Mapping[str, float], *, is_last: bool) -> None:
        if self._may_save(step, is_last=is_last):
            self._begin(step, evaluated, must_succeed=is_last)
            self._last = time.monotonic()
            self.metrics.restart()
        self._is_put_off = not is_last and self.contents.rollback.guard.in_a_row > 0

    def _may_save(self, step: int, *, is_last: bool) -> bool:
        """Return whether the run need not go back; and if another save will follow, whether the step has been a good
        one: the newest checkpoint is then one from before what may be wrong."""
        guard, parameters = self.contents.rollback.guard, [*self.contents.built.model.parameters.values()]
        self.metrics.sync()
        must_wait = guard.has_failed or (not is_last and guard.in_a_row > 0)
        if must_wait or not guard.parameters_are_finite(parameters, step):
            return False
        self.run.emit("save_start")
        return True

    def _begin(self, step: int, evaluated: Mapping[str, float], *, must_succeed: bool) -> None:
        self.finish()
        self.mirror.refuse_if_failed()
        self._begun_at = step
        self._snapshot = partial(self.contents.snapshot, step, evaluated)
        with self._waiting():
            self.saver.save(self._snapshot())
        if not self.run.job.checkpoint.background:
            self.finish(must_succeed=must_succeed)

    def restart(self) -> None:
        """Forget that a save was put off: the run is at another step now."""
        self._is_put_off = False

    def wait_until_copied(self) -> None:
        """Before anything that is being saved changes."""
        self.saver.wait_until_copied()
        self.mirror.wait_until_copied()

    def finish_run(self) -> None:
        """Wait for the last save and the mirror. Raises as ``finish`` does."""
        self.finish(must_succeed=True)
        with self._waiting():
            self.mirror.finish_run()

    def finish(self, *, must_succeed: bool = False) -> None:
        """Wait for the save that is under way, if there is one.

        Args:
            must_succeed: it is the last one of the run, which is tried again.

        Raises:
            ForgeError: it has failed, and the run cannot go on without it.
        """
        self.mirror.wait_until_copied()
        with self._waiting():
            saved = self.saver.finish()
        self._begun_at = None
        if saved is None:
            return
        self._note_end(saved)
        if must_succeed:
            saved = self._persist(saved)
        if saved.error is None:
            self.saved_step = saved.step
            self.run.log(f"saved {saved.path.name}")
            self.committed(saved)
            self.run.emit("checkpoint_saved", step=saved.step, path=saved.path)
            self.mirror.saved(saved.path)
            self._prune(saved.step)
            return
        if must_succeed or self.run.job.checkpoint.on_failure == "stop" or isinstance(saved.error, LeaseLostError):
            raise saved.error
        self.run.log(f"saving step {saved.step} failed, training goes on: {saved.error}")

    def _note_end(self, saved: Saved) -> None:
        if saved.error is None:
            times = {"seconds": saved.seconds, "seconds_blocked": saved.seconds_blocked}
            self.run.directory.write_event("saved", step=saved.step, **times)
        else:
            self.run.directory.write_event("save_failed", step=saved.step, error=str(saved.error))

    def _persist(self, saved: Saved) -> Saved:
        """Try again what has failed: a disk that is full or away for a moment must not cost the last steps."""
        assert self._snapshot is not None, "a save has ended"
        for seconds in TRIED_AGAIN_AFTER:
            if saved.error is None or isinstance(saved.error, LeaseLostError):
                break
            self.run.log(f"saving step {saved.step} failed, it is tried again in {seconds:g} s: {saved.error}")
            with self._waiting():
                time.sleep(seconds)
                self.saver.save(self._snapshot())
                again = self.saver.finish()
            assert again is not None, "it has just been begun"
            saved = again
            self._note_end(saved)
        return saved

    def close(self) -> None:
        """After a failure, too: what is being written is not cut off."""
        if (saved := self.saver.close()) is not None:
            self._note_end(saved)
        self.mirror.close()

    def _waiting(self) -> AbstractContextManager[None]:
        """For files to be written, which may take longer than a step."""
        return self.run.supervisor.patient(self.run.job.checkpoint.timeout)

    def _prune(self, newest: int) -> None:
        """Later ones than ``newest`` have been passed over when the run began: they are damaged, and would be counted
        in the place of whole ones."""
        if self.run.mesh.rank > 0:
            return
        there = {}
        for step in self.store.steps():
            if step <= newest:
                with suppress(DamagedError):  # not ours to judge by, nor to remove
                    there[step] = read_manifest(self.store.folder(step))
        steps = superfluous([(step, found.metrics) for step, found in there.items()], self.run.job.checkpoint)
        steps = self.mirror.may_remove(steps, {step: found.n_bytes for step, found in there.items()})
        try:
            self.store.begin_to_remove(steps)
        except OSError as error:
            self.run.log(f"could not remove checkpoints that are no longer kept: {error}")
