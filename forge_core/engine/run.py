"""One run of a job, on one rank: everything is checked, then built, then restored, then trained."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist

from forge_core.builder import ComponentBuilder
from forge_core.catalog import Catalog
from forge_core.checkpoint.compatibility import changed_keys
from forge_core.checkpoint.store import Checkpoint, CheckpointStore
from forge_core.checkpoint.tensors import empty_optimizer_state, optimizer_state
from forge_core.component import Use
from forge_core.config.job import check_components, dump_job, job_table
from forge_core.config.sections import Job
from forge_core.contracts.callback import Callback, Requests, RunContext
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.scheduler import Schedule
from forge_core.data.loader import BatchLoader, evaluation_batches
from forge_core.data.stream import SampleStream
from forge_core.engine.build import BuiltModel, build_model, build_optimizer, choose_vocab_size
from forge_core.engine.console import Console
from forge_core.engine.fingerprint import refuse_unequal_ranks
from forge_core.engine.lifecycle import Lifecycle, callback_state, load_callback_state
from forge_core.engine.measurement import Measurement
from forge_core.engine.mesh import Mesh, build_mesh, choose_device, join_process_group
from forge_core.engine.ranks import from_first_rank, lost_peers_named, on_all_ranks
from forge_core.engine.signals import stop_on_signals
from forge_core.engine.timeouts import Timeouts
from forge_core.engine.trackers import Trackers
from forge_core.engine.trainer import Trainer
from forge_core.errors import ConfigError, ExitCode
from forge_core.hardware import peak_flops
from forge_core.passes import sort_passes
from forge_core.run_directory import RunDirectory, describe_environment


def run_job(job: Job, catalog: Catalog, *, dry_run: bool = False) -> ExitCode:
    """Run ``job`` in this process, which is one rank of the group that the environment describes, or a group of one.

    Returns:
        COMPLETED or STOPPED.

    Raises:
        ForgeError: its ``exit_code`` says how the process should end. Nothing has been written if it is INVALID.
    """
    device = choose_device(job.run.device)
    join_process_group(device, job.run.first_step_timeout)
    try:
        with lost_peers_named():
            return _run(job, catalog, device, dry_run)
    finally:
        dist.destroy_process_group()


def _run(job: Job, catalog: Catalog, device: torch.device, dry_run: bool) -> ExitCode:
    on_all_ranks(lambda: refuse_unequal_ranks(job, catalog))
    prepared = on_all_ranks(lambda: _prepare(job, catalog, device))
    if prepared.is_complete:
        prepared.console.line(f"{prepared.directory.path} already has all {job.train.steps} steps; nothing to do")
        return ExitCode.COMPLETED
    built = on_all_ranks(lambda: _build(prepared))
    if dry_run:
        _describe(prepared, built)
        return ExitCode.COMPLETED
    return _train(prepared, built)


@attrs.frozen
class _Prepared:
    """What is known before anything large is built, or anything is written."""

    job: Job
    catalog: Catalog
    build: ComponentBuilder
    device: torch.device
    mesh: Mesh
    passes: Sequence[Use]
    source: DataSource
    loader: BatchLoader
    validation: DataSource | None
    vocab_size: int
    schedule: Schedule
    callbacks: Sequence[tuple[str, Callback]]
    lifecycle: Lifecycle
    directory: RunDirectory
    store: CheckpointStore
    checkpoint: Checkpoint | None
    console: Console

    @property
    def is_complete(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.step == self.job.train.steps


@attrs.frozen
class _Built:
    model: BuiltModel
    optimizer: torch.optim.Optimizer


def _prepare(job: Job, catalog: Catalog, device: torch.device) -> _Prepared:
    mesh = build_mesh(job, device)
    directory = RunDirectory(job, writes=mesh.rank == 0)
    console = Console(speaks=mesh.rank == 0, record=directory.write_log)
    store = CheckpointStore(directory.checkpoints)
    # ranks talk to each other here, so it comes before anything that may fail on one of them alone
    checkpoint = from_first_rank(lambda: store.newest(console.line))
    # what a component refuses on one device and not on another is known now that `auto` is
    check_components(attrs.evolve(job, run=attrs.evolve(job.run, device=cast("Any", device.type))))
    build = ComponentBuilder(catalog)
    source: DataSource = build(job.data, seq_len=job.train.seq_len, split="train")
    directory.refuse_if_unwritable()
    if checkpoint is not None:
        _refuse_if_incompatible(job, source, checkpoint, console)
    callbacks = [(f"plugin.{use.provider}.callback.{use.name}", build(use)) for use in job.callbacks]
    return _Prepared(
        job=job,
        catalog=catalog,
        build=build,
        device=device,
        mesh=mesh,
        passes=sort_passes(job, catalog),
        source=source,
        loader=_loader(job, source, mesh, device, checkpoint),
        validation=_validation_source(job, source, build) if job.eval.interval else None,
        vocab_size=choose_vocab_size(job, source),
        schedule=build(job.scheduler, total_steps=job.train.steps),
        callbacks=callbacks,
        lifecycle=Lifecycle(
            [
                ("timeouts", Timeouts(job.run)),
                ("console", console),
                *(("progress bar", bar) for bar in console.progress()),
                *callbacks,
            ]
        ),
        directory=directory,
        store=store,
        checkpoint=checkpoint,
        console=console,
    )


def _loader(
    job: Job, source: DataSource, mesh: Mesh, device: torch.device, checkpoint: Checkpoint | None
) -> BatchLoader:
    train, config = job.train, job.data.config
    seed = train.seed if train.data_seed is None else train.data_seed
    return BatchLoader(
        SampleStream(source, seed=seed, shuffle=config.shuffle),
        position=checkpoint.state()["position"] if checkpoint else 0,
        batch_size=train.batch_size,
        grad_accumulation=train.grad_accumulation or 1,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        workers=config.workers,
        prefetch=config.prefetch,
        pin_memory=device.type == "cuda",
    )


def _validation_source(job: Job, training: DataSource, build: ComponentBuilder) -> DataSource:
    split = "validation" if job.eval.data is None else "all"
    source: DataSource = build(job.eval.data or job.data, seq_len=job.train.seq_len, split=split)
    if source.vocab_size > training.vocab_size:
        raise ConfigError(
            f"eval.data: it has a vocabulary of {source.vocab_size}, the training data of {training.vocab_size}; "
            "prepare both with the same tokenizer"
        )
    ours, theirs = training.tokenizer, source.tokenizer
    if ours is not None and theirs is not None and ours.fingerprint != theirs.fingerprint:
        raise ConfigError("eval.data: it has another tokenizer than the training data, so their losses mean nothing")
    return source


def _refuse_if_incompatible(job: Job, source: DataSource, checkpoint: Checkpoint, console: Console) -> None:
    saved_job = tomllib.loads((checkpoint.path / "job.toml").read_text())
    changes = changed_keys(saved_job, job_table(job), str(checkpoint.path))
    if checkpoint.state()["data_fingerprint"] != source.fingerprint:
        keys = [change.key for change in changes if change.key.startswith("data.")]
        why = f"these keys differ: {', '.join(keys)}" if keys else "its files have changed"
        raise ConfigError(
            f"{checkpoint.path} was trained on other data ({why}); choose another run.name to start afresh"
        )
    if checkpoint.step > job.train.steps:
        raise ConfigError(
            f"train.steps = {job.train.steps}, but {checkpoint.path} is at step {checkpoint.step} already"
        )
    for change in changes:
        if not change.key.startswith(("run.", "metrics.", "checkpoint.")) and (change.old or change.new):
            console.line(f"resuming with another {change.key}: {change.old} -> {change.new}")


def _build(prepared: _Prepared) -> _Built:
    model = build_model(
        prepared.job, prepared.vocab_size, prepared.mesh, prepared.device, prepared.passes, prepared.build
    )
    return _Built(model, build_optimizer(prepared.job, model, prepared.build))


def _describe(prepared: _Prepared, built: _Built) -> None:
    say = prepared.console.line
    size = f"{built.model.n_parameters:,} parameters, vocabulary {prepared.vocab_size:,}"
    say(f"model {prepared.job.model.qualified_name}: {size}")
    say("mesh " + ", ".join(f"{axis} {degree}" for axis, degree in prepared.mesh.degrees.items()))
    for applied in built.model.applied:
        ranks = prepared.mesh.gather_over("pp", [*applied.touched])
        for rank, names in enumerate(ranks):
            where = f", rank {rank} of pp" if len(ranks) > 1 else ""
            touched = ", ".join(name or "the model" for name in names)
            say(f"pass {applied.use.qualified_name}{where}: {len(names)} modules: {touched}")
    say(f"data {len(prepared.source):,} samples of {prepared.job.train.seq_len} tokens an epoch")
    say("dry run: stopped before the first step; nothing was written")


def _train(prepared: _Prepared, built: _Built) -> ExitCode:
    job, mesh, checkpoint = prepared.job, prepared.mesh, prepared.checkpoint
    _restore(prepared, built)
    versions = {plugin.distribution: plugin.version for plugin in prepared.catalog.plugins if plugin.status == "ok"}
    environment = describe_environment(versions, mesh.degrees, str(prepared.device))
    on_all_ranks(lambda: prepared.directory.open(job, environment, checkpoint.step if checkpoint else 0))
    if mesh.rank == 0:
        prepared.store.remove_unfinished()
    _announce(prepared, built)

    requests = Requests()
    context = RunContext(
        job=job,
        run_dir=prepared.directory.path,
        rank=mesh.rank,
        world_size=mesh.world_size,
        device=prepared.device,
        parts=built.model.parts,
        optimizer=built.optimizer,
        total_steps=job.train.steps,
        requests=requests,
        log=prepared.console.line,
    )
    lifecycle = prepared.lifecycle
    loader = prepared.loader
    trackers = Trackers(prepared.build, job, prepared.directory.path, prepared.console.line, active=mesh.rank == 0)

    def record(values: Mapping[str, float]) -> None:
        if mesh.rank == 0:
            prepared.directory.write_metrics(values)
            trackers.log(values)

    trainer = Trainer(
        job=job,
        mesh=mesh,
        device=prepared.device,
        parts=built.model.parts,
        executor=built.model.executor,
        optimizer=built.optimizer,
        schedule=prepared.schedule,
        loader=loader,
        evaluation=_evaluation(prepared),
        measurement=Measurement(
            prepared.device,
            built.model.flops_per_token,
            peak_flops(prepared.device),
            mesh.world_size,
        ),
        lifecycle=lifecycle,
        context=context,
        save=lambda step, tokens: _save(prepared, built, loader, step, tokens),
        record=record,
        step=checkpoint.step if checkpoint else 0,
    )
    outcome = "failed"
    try:
        with stop_on_signals(requests, prepared.console.line):
            completed = trainer.run()
        outcome = "completed" if completed else "stopped"
        prepared.console.line(
            f"done: {trainer.step} steps"
            if completed
            else f"stopped at step {trainer.step}, saved; the same command continues"
        )
        return ExitCode.COMPLETED if completed else ExitCode.STOPPED
    except BaseException as error:
        lifecycle.call_failed(prepared.console.line, run=context, step=trainer.step, error=error)
        prepared.directory.write_log(f"failed at step {trainer.step}: {type(error).__name__}: {error}")
        raise
    finally:
        loader.close()
        trackers.close(outcome)
        prepared.directory.close()


def _restore(prepared: _Prepared, built: _Built) -> None:
    """Fill model, optimizer and callbacks from the checkpoint, if there is one."""
    if prepared.checkpoint is None:
        return
    state = prepared.checkpoint.state()
    names = built.model.parameters
    tensors = built.model.tensors()
    saved = prepared.checkpoint.saved_tensors()
    in_all_stages = {name for stage in prepared.mesh.gather_over("pp", [*names]) for name in stage}
    elsewhere = in_all_stages - names.keys()
    tensors.update(empty_optimizer_state(built.optimizer, names, saved, state["optimizer"], elsewhere))
    read = {key for stage in prepared.mesh.gather_over("pp", [*tensors]) for key in stage}
    if unread := sorted(saved.keys() - read):
        raise ConfigError(f"{prepared.checkpoint.path} has tensors this model does not: {', '.join(unread[:10])}")
    prepared.checkpoint.load(tensors)
    for namespace in load_callback_state(prepared.callbacks, state["callbacks"]):
        prepared.console.line(f"the checkpoint has state of {namespace}, which this job does not name; it is dropped")


def _announce(prepared: _Prepared, built: _Built) -> None:
    job, checkpoint = prepared.job, prepared.checkpoint
    start = f"resumed from {checkpoint.path.name}" if checkpoint else "fresh start"
    axes = {axis: degree for axis, degree in prepared.mesh.degrees.items() if degree > 1}
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in axes.items()) or "one process"
    prepared.console.line(
        f"{job.run.name}: {start}; {built.model.n_parameters:,} parameters, {job.train.precision} on "
        f"{prepared.device.type}, {mesh}; {job.train.steps} steps; files in {prepared.directory.path}"
    )


def _evaluation(prepared: _Prepared) -> Callable[[], Iterator[Mapping[str, torch.Tensor]]] | None:
    source = prepared.validation
    if source is None:
        return None
    return lambda: evaluation_batches(
        source,
        batch_size=prepared.job.train.batch_size,
        dp_rank=prepared.mesh.dp_rank,
        dp_size=prepared.mesh.dp_size,
        batches=prepared.job.eval.batches,
    )


def _save(prepared: _Prepared, built: _Built, loader: BatchLoader, step: int, tokens: int) -> Path:
    names = built.model.parameters
    tensors, own_facts = optimizer_state(built.optimizer, names)
    facts = prepared.mesh.gather_over("pp", own_facts)
    tokenizer = prepared.source.tokenizer
    state: dict[str, Any] = {
        "step": step,
        "tokens": tokens,
        "position": loader.position,
        "data_fingerprint": prepared.source.fingerprint,
        "vocab_size": prepared.vocab_size,
        "optimizer": {
            "values": {name: value for stage in facts for name, value in stage["values"].items()},
            "on_host": sorted({slot for stage in facts for slot in stage["on_host"]}),
        },
        "callbacks": callback_state(prepared.callbacks),
        "mesh": dict(prepared.mesh.degrees),
    }

    def write_more(folder: Path) -> None:  # before ``state`` is written
        (folder / "job.toml").write_text(dump_job(prepared.job))
        if tokenizer is not None:
            (folder / "tokenizer").mkdir()
            state["tokenizer"] = dict(tokenizer.save(folder / "tokenizer"))

    path = prepared.store.save(step, {**built.model.tensors(), **tensors}, state, write_more)
    prepared.console.line(f"saved {path.name}")
    return path
