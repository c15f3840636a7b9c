"""Where a run starts: from which checkpoint, and what has to be as it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from stat import S_ISREG
from typing import Any

import attrs
import torch

from forge_core.checkpoint.compatibility import changed_keys, changes_that_matter, value_text, versions_changed
from forge_core.checkpoint.component_state import load_states, tensors_of
from forge_core.checkpoint.contents import resume_problem
from forge_core.checkpoint.state_dict import empty_optimizer_state
from forge_core.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint
from forge_core.checkpoint.upgrading import (
    Changes,
    module_changes,
    module_versions,
    refuse_versions_lost,
    upgrade_optimizer,
)
from forge_core.config.diff import differences
from forge_core.config.sections import Job, PhaseSection, TrainSection
from forge_core.config.toml_text import parse_toml
from forge_core.config.unstructure import plain
from forge_core.contracts.builder import Builder
from forge_core.contracts.callback import Callback
from forge_core.contracts.data_source import Source
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError, and_more
from forge_core.job import job_table
from forge_core.train.build import BuiltModel


@attrs.frozen
class Start:
    """Afresh, or from a checkpoint."""

    checkpoint: Checkpoint | None
    seen: Sequence[int]
    """Steps of the run's checkpoints when this was decided."""
    keeps_until: int | None = None
    """Checkpoints of later steps are put aside when the run begins to write."""
    is_elsewhere: bool = False
    """The checkpoint is that of a path: another run's."""

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def passed_over(self) -> Sequence[int]:
        """Steps of the run's later checkpoints, which are damaged."""
        return [] if self.keeps_until is not None else [step for step in self.seen if step > self.step]


def resume_asked_for(job: Job, last_job: str | None, report: Callable[[str], None]) -> str:
    """``checkpoint.resume``, except that ``never`` and a step are done once: when the very same job is started again,
    as a scheduler does that puts it back into its queue, that means ``auto``, or it would lose its work each time.

    Args:
        last_job: the ``job.toml`` of the run, which says what it was last started with, if there is one. It is written
            after checkpoints have been put aside.
    """
    resume = job.checkpoint.resume
    if resume != "never" and not resume.isdecimal():
        return resume
    try:
        last = parse_toml(last_job or "")
    except ValueError:
        return resume
    # a job that is put back into the queue may get another machine, and more or fewer ranks
    elsewhere = ("run.dir", "run.device", "parallel.", "train.global_batch_size", "train.grad_accumulation")
    if any(not change.key.startswith(elsewhere) for change in differences(last, job_table(job))):
        return resume
    report(
        f"checkpoint.resume = {resume!r} was done when this job was last started; now it goes on from its newest "
        "checkpoint. To do it once more, move the later checkpoints away, or choose another run.name."
    )
    return "auto"


def choose_start(
    resume: str, store: CheckpointStore, report: Callable[[str], None], events: Sequence[Mapping[str, Any]] = ()
) -> Start:
    """Resolve ``resume``, a value of ``checkpoint.resume``. All ranks come to the same conclusion.

    Args:
        events: of the run so far, on rank 0.

    Raises:
        ConfigError: it names a checkpoint that is not there or is damaged; or there are checkpoints, and none is whole.
    """
    if resume == "never":
        return Start(None, run_on_rank0(store.steps), keeps_until=-1)
    if resume.isdecimal():
        return Start(store.at(int(resume), report), run_on_rank0(store.steps), keeps_until=int(resume))
    if resume == "auto":
        return Start(store.newest(report), run_on_rank0(store.steps))
    run_on_rank0(lambda: _refuse_if_nothing(resume))
    newest, seen = store.newest(report), run_on_rank0(store.steps)
    if newest is None:
        return Start(find_checkpoint(Path(resume).expanduser(), report, resume_problem), seen, is_elsewhere=True)
    report(f"checkpoint.resume = {resume!r} {_why_not(resume, events)}; it goes on from {newest.path.name}")
    return Start(newest, seen)


def _why_not(resume: str, events: Sequence[Mapping[str, Any]]) -> str:
    """Why a run that has checkpoints of its own does not start from a path."""
    path = Path(resume).expanduser().resolve()
    began_from = [Path(event["checkpoint"]) for event in events if isinstance(event.get("checkpoint"), str)]
    if any(path in (one, one.parent, one.parent.parent) for one in began_from):
        return "is where this run began"
    return "is not used, as this run has checkpoints of its own (to start there, choose another run.name)"


def _refuse_if_nothing(resume: str) -> None:
    expected = (
        f"checkpoint.resume = {resume!r}: expected auto, never, the step of one of this run's checkpoints, or the path "
        "of a checkpoint or of a run"
    )
    try:
        if S_ISREG(Path(resume).expanduser().stat().st_mode):
            raise ConfigError(f"{expected}, and this is a file")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{expected}, and there is nothing of that name") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{expected}, and it cannot be looked at ({error})") from error


def refuse_if_gone(checkpoints: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Refuse to train a run once more from its beginning that has saved steps, where no checkpoint is left.

    Args:
        events: of all attempts at the run.

    Raises:
        ConfigError: it has, as where a disk is not mounted.
    """
    saved = None
    for event in events:
        saved = event.get("step") if event["event"] == "saved" else None if event["event"] == "started" else saved
    if saved is not None:
        raise ConfigError(
            f"{checkpoints} has no checkpoint, and this run has saved step {saved} there: is a disk missing? To start "
            "afresh: with another run.name, or with --resume never"
        )


def refuse_if_incompatible(
    job: Job,
    source: Source,
    checkpoint: Checkpoint,
    build: Builder,
    adding: Collection[str],
    report: Callable[[str], None],
) -> None:
    """Report what differs from the job that wrote ``checkpoint``.

    Args:
        adding: the keys of passes that add parameters.

    Raises:
        ConfigError: something does that cannot, each with both values.
    """
    saved_job, path = checkpoint.job(), checkpoint.path
    saved_job["model"] = _with_new_keys(saved_job["model"], build)
    fixed = [f"parallel.passes.{key}" for key in adding]
    changes = changed_keys(saved_job, job_table(job), str(path), fixed)
    if checkpoint.state()["data_fingerprint"] != source.fingerprint:
        keys = {one.key for one in changes if one.key.startswith("data.")} - {"data.workers", "data.prefetch"}
        why = f"these keys differ: {', '.join(sorted(keys))}" if keys else "its files have changed"
        raise ConfigError(f"{path} was trained on other data ({why}); choose another run.name to start afresh")
    _refuse_other_phases(job, saved_job, checkpoint)
    if checkpoint.step >= job.train.steps:
        raise ConfigError(f"train.steps = {job.train.steps}, but {path} is at step {checkpoint.step} already")
    if changed := versions_changed(checkpoint.manifest.versions, job_table(job)):
        report(f"resuming with other versions than {path.name} was saved with: {', '.join(changed)}")
    for change in changes_that_matter(saved_job, job_table(job)):
        report(f"resuming with another {change.key}: {value_text(change.old)} -> {value_text(change.new)}")


def _refuse_other_phases(job: Job, saved_job: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Phases that have begun stay as they were; phases to come may change."""
    keys = ("steps", "seq_len", "global_batch_size")
    saved_train = attrs.evolve(job.train, **{key: saved_job["train"].get(key) for key in keys})
    saved = [PhaseSection(**{**one, "train": tuple(one["train"])}) for one in saved_job.get("phases", ())]
    before, now = _begun(saved, saved_train, checkpoint.step), _begun(job.phases, job.train, checkpoint.step)
    if before != now:
        was, is_now = (", ".join(f"step {start}" for start, *_ in one) or "none" for one in (before, now))
        raise ConfigError(
            f"phases: {checkpoint.path} is at step {checkpoint.step}, and phases that have begun differ: they began at "
            f"{was}, and by this job at {is_now}, or say something else. Change only phases to come, or choose another "
            "run.name to start afresh"
        )
    saved_size, size = saved_train.global_batch_size, job.train.global_batch_size
    if saved_size != size and any(one.data for one in job.phases):
        why = f"the data of phases begin at samples counted by it, and {checkpoint.path} was trained with {saved_size}"
        raise ConfigError(f"train.global_batch_size: {why}, got {size}; choose another run.name to start afresh")


def _begun(phases: Sequence[PhaseSection], train: TrainSection, step: int) -> list[tuple[int, object]]:
    """The phases that hold for updates up to that of ``step``: the first step of each, and all that it says."""
    found = ((one.first_step(train), (one.lr_scale, one.train, plain(one.data))) for one in phases)
    return [(start, said) for start, said in found if start is not None and start <= step]


def _with_new_keys(model: Mapping[str, Any], build: Builder) -> Mapping[str, Any]:
    """With the default of each key that a plugin has got since, by which it does what it did before."""
    try:
        completed: Mapping[str, Any] = plain(build.resolve("model", model))
    except ConfigError:
        return model  # it has lost a key, or taken one of its values back: compared as it was written
    return completed


def restore(
    checkpoint: Checkpoint,
    model: BuiltModel,
    optimizer: torch.optim.Optimizer,
    callbacks: Sequence[tuple[str, Callback]],
    mesh: Mesh,
    report: Callable[[str], None],
) -> None:
    """Fill model, optimizer and callbacks from a checkpoint.

    Raises:
        ConfigError: it has tensors that these have not, or lacks some that they have.
        PluginError: a component does not take what an earlier version of it has saved.
    """
    state, saved = run_on_all_ranks(lambda: (checkpoint.state(), checkpoint.saved_tensors()))
    own = run_on_all_ranks(lambda: module_changes(model.parts, state.get("modules", {})))
    here = reduce(lambda one, other: one | other, mesh.gather_over("pp", module_versions(model.parts)))
    run_on_all_ranks(lambda: refuse_versions_lost(state.get("modules", {}), here))
    changes = reduce(Changes.joined, mesh.gather_over("pp", own))
    names = {changes.then.get(name, name): parameter for name, parameter in model.parameters.items()}
    tensors = own.to_read(model.tensors())
    in_all_stages = {name for stage in mesh.gather_over("pp", [*names]) for name in stage}
    elsewhere = (in_all_stages | changes.dropped) - names.keys()

    def match() -> None:
        tensors.update(empty_optimizer_state(optimizer, names, saved, state["optimizer"], elsewhere))
        checkpoint.refuse_misfits(tensors)

    run_on_all_ranks(match)  # before they read together
    read = {key for stage in mesh.gather_over("pp", [*tensors]) for key in stage}
    dropped = {key for key in saved if _name_of(key) in changes.dropped}
    others = {key for key in saved if key.startswith(("evaluation.", "plugin."))}
    run_on_all_ranks(lambda: _refuse_unread(saved.keys() - read - dropped - others, checkpoint))
    checkpoint.load(tensors)
    run_on_all_ranks(lambda: upgrade_optimizer(optimizer, state["optimizer"].get("version", 1)))
    for namespace in load_states(callbacks, state["callbacks"], checkpoint.manifest.versions):
        report(f"the checkpoint has state of {namespace}, which this job does not name; it is dropped")


def restore_tensors(
    checkpoint: Checkpoint,
    callbacks: Sequence[tuple[str, Callback]],
    mesh: Mesh,
    report: Callable[[str], None],
    others: str = "begin anew",
) -> None:
    """Fill the tensors of callbacks, which have made them, from a checkpoint.

    Args:
        others: says in a message what becomes of tensors that it lacks.

    Raises:
        ConfigError: one has another shape or dtype there.
    """
    own, saved = run_on_all_ranks(lambda: (tensors_of(callbacks), checkpoint.saved_tensors()))
    here = {key for stage in mesh.gather_over("pp", [*own]) for key in stage}
    there = {key for key in saved if key.startswith("plugin.")}
    if here & there:
        tensors = {key: tensor for key, tensor in own.items() if key in there}
        run_on_all_ranks(lambda: checkpoint.refuse_misfits(tensors))
        checkpoint.load(tensors)
    for keys, what in ((here - there, f"does not have, which {others}"), (there - here, "has alone; they are dropped")):
        if keys:
            names = ", ".join(sorted(keys)[:3]) + and_more(len(keys), 3)
            report(f"tensors of callbacks that the checkpoint {what}: {names}")


def _name_of(key: str) -> str:
    """The tensor of a model that a key of a checkpoint is about."""
    namespace, _, name = key.partition(".")
    return name if namespace == "model" else name.rpartition(".")[0]


def _refuse_unread(keys: Collection[str], checkpoint: Checkpoint) -> None:
    if keys:
        more = and_more(len(keys), 10)
        raise ConfigError(f"{checkpoint.path} has tensors this model does not: {', '.join(sorted(keys)[:10])}{more}")
