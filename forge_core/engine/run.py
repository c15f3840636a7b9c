"""One run of a job, on one rank: everything is checked, then built, then restored, then trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist

import forge_core
from forge_core.builder import ComponentBuilder
from forge_core.catalog import Catalog
from forge_core.checkpoint.copier import Copier
from forge_core.checkpoint.fetching import Fetching
from forge_core.checkpoint.mirror import Mirror, open_mirror
from forge_core.checkpoint.saver import Saved, Saver
from forge_core.checkpoint.store import Checkpoint, CheckpointStore
from forge_core.component import PassComponent, Use
from forge_core.config.job import check_device, dump_job
from forge_core.config.mirror_url import url_of_run
from forge_core.config.sections import Job
from forge_core.contracts.callback import PREEMPTIONS, Callback, Requests, RunContext
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.replication import Replication
from forge_core.contracts.scheduler import Schedule
from forge_core.data.loader import BatchLoader, evaluation_batches
from forge_core.data.stream import SampleStream
from forge_core.engine.anomalies import Anomalies
from forge_core.engine.build import BuiltModel, build_model, build_optimizer, choose_vocab_size
from forge_core.engine.console import Console
from forge_core.engine.deadline import Deadline
from forge_core.engine.fingerprint import refuse_unequal_ranks
from forge_core.engine.lifecycle import Lifecycle
from forge_core.engine.live_state import LiveParts
from forge_core.engine.measurement import Measurement
from forge_core.engine.mesh import Mesh, build_mesh, choose_device, join_process_group
from forge_core.engine.mirroring import Mirroring
from forge_core.engine.pass_table import PassRow, pass_table
from forge_core.engine.peers import Peers
from forge_core.engine.ranks import from_first_rank, on_all_ranks, slowly_from_first_rank
from forge_core.engine.replicas import JoinedReplicas, Replicas, refuse_several_replications
from forge_core.engine.resuming import Start, choose_start, refuse_if_incompatible, restore, resume_asked_for
from forge_core.engine.rolling_back import RollingBack
from forge_core.engine.saving import Contents, Saving
from forge_core.engine.signals import stop_on_signals
from forge_core.engine.timeouts import Timeouts
from forge_core.engine.trackers import Trackers
from forge_core.engine.trainer import Trainer
from forge_core.engine.warm_start import WarmStart, choose_warm_start, load_warm_start
from forge_core.errors import ConfigError, ExitCode, MirrorError, exit_code_of
from forge_core.hardware import peak_flops
from forge_core.lease import Lease, Sign, refuse_if_held, refuse_unless_shared
from forge_core.passes import sort_passes
from forge_core.run_directory import RunDirectory, describe_environment


def run_job(job: Job, catalog: Catalog, *, dry_run: bool = False) -> ExitCode:
    """Run ``job`` in this process, which is one rank of the group that the environment describes, or a group of one.

    Returns:
        COMPLETED or STOPPED.

    Raises:
        ForgeError: its ``exit_code`` says how the process should end. Nothing has been written if it is INVALID, but
            for a checkpoint that was fetched from the mirror.
    """
    started = time.monotonic()
    device = choose_device(job.run.device)
    join_process_group(device, job.run.first_step_timeout)
    peers = Peers(job.run, RunDirectory(job, writes=False).path)
    try:
        with peers.lost_ones_named():
            return _run(job, catalog, device, peers, started, dry_run)
    finally:
        dist.destroy_process_group()
        peers.close()


def _run(job: Job, catalog: Catalog, device: torch.device, peers: Peers, started: float, dry_run: bool) -> ExitCode:
    on_all_ranks(lambda: refuse_unequal_ranks(job, catalog))
    prepared = on_all_ranks(lambda: _prepare(job, catalog, device, peers, dry_run))
    peers.sign()
    if prepared.is_complete:
        prepared.console.line(f"{prepared.directory.path} already has all {job.train.steps} steps; nothing to do")
        if not dry_run:
            _complete_mirror(prepared)
        return ExitCode.COMPLETED
    deadline = on_all_ranks(lambda: Deadline(job.run, started))
    built = on_all_ranks(lambda: _build(prepared))
    peers.sign()
    if dry_run:
        _describe(prepared, built)
        return ExitCode.COMPLETED
    return _train(prepared, built, deadline)


@attrs.frozen
class _Prepared:
    """What is known before anything large is built, or anything is written."""

    job: Job
    catalog: Catalog
    build: ComponentBuilder
    device: torch.device
    mesh: Mesh
    peers: Peers
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
    start: Start
    warm_start: WarmStart | None
    ended: Sign | None
    console: Console

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.start.checkpoint

    @property
    def is_complete(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.step == self.job.train.steps


@attrs.frozen
class _Built:
    model: BuiltModel
    optimizer: torch.optim.Optimizer


def _prepare(job: Job, catalog: Catalog, device: torch.device, peers: Peers, dry_run: bool) -> _Prepared:
    mesh = build_mesh(job, device)
    directory = RunDirectory(job, writes=mesh.rank == 0)
    console = Console(speaks=mesh.rank == 0, record=directory.write_log)
    store = CheckpointStore(directory.checkpoints)
    # ranks talk to each other here, so it comes before anything that may fail on one of them alone
    ended = from_first_rank(lambda: refuse_if_held(directory.path))
    fetching = None
    if job.checkpoint.mirror is not None and dry_run:
        console.line("dry run: goes by the checkpoints that are here; those at checkpoint.mirror are not fetched")
    elif (mirror := _mirror(job)) is not None:
        fetching = Fetching(mirror, job.checkpoint.on_failure == "stop", peers.sign)
    last_job = (fetching.last_job() if fetching else None) or directory.last_job()
    resume = from_first_rank(lambda: resume_asked_for(job, last_job, console.line))
    start = choose_start(resume, CheckpointStore(store.path, fetching), console.line)
    checkpoint = start.checkpoint
    warm_start = choose_warm_start(job, console.line) if checkpoint is None else None
    # what a component refuses on one device and not on another is known now that `auto` is
    check_device(attrs.evolve(job, run=attrs.evolve(job.run, device=cast("Any", device.type))), catalog)
    build = ComponentBuilder(catalog)
    source: DataSource = build(job.data, seq_len=job.train.seq_len, split="train")
    directory.refuse_if_unwritable()
    if checkpoint is not None:
        refuse_if_incompatible(job, source, checkpoint, console.line)
    callbacks = [(f"plugin.{use.provider}.callback.{use.name}", build(use)) for use in job.callbacks]
    refuse_several_replications(callbacks)
    return _Prepared(
        job=job,
        catalog=catalog,
        build=build,
        device=device,
        mesh=mesh,
        peers=peers,
        passes=sort_passes(job, catalog),
        source=source,
        loader=_loader(job, source, mesh, device, checkpoint),
        validation=_validation_source(job, source, build) if job.eval.interval else None,
        vocab_size=choose_vocab_size(job, source),
        schedule=build(job.scheduler, total_steps=job.train.steps),
        callbacks=callbacks,
        lifecycle=Lifecycle(
            [
                *([("timeouts", Timeouts(job.run)), ("peers", peers)] if mesh.world_size > 1 else []),
                ("console", console),
                *(("progress bar", bar) for bar in console.progress()),
                *callbacks,
            ]
        ),
        directory=directory,
        store=store,
        start=start,
        warm_start=warm_start,
        ended=ended,
        console=console,
    )


def _mirror(job: Job) -> Mirror | None:
    mirror = job.checkpoint.mirror
    return None if mirror is None else open_mirror(url_of_run(mirror, str(job.run.name)))


def _loader(
    job: Job, source: DataSource, mesh: Mesh, device: torch.device, checkpoint: Checkpoint | None
) -> BatchLoader:
    train, config = job.train, job.data.config
    seed = train.seed if train.data_seed is None else train.data_seed
    state = checkpoint.state() if checkpoint else {}
    return BatchLoader(
        SampleStream(source, seed=seed, shuffle=config.shuffle, left_out=state.get("left_out", ())),
        position=state.get("position", 0),
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
    rows = [
        PassRow(one.use.qualified_name, _phase(prepared, one.use), prepared.mesh.gather_over("pp", [*one.touched]))
        for one in built.model.applied
    ]
    for line in pass_table(rows) if rows else ["no pass is applied"]:
        say(line)
    say(f"data {len(prepared.source):,} samples of {prepared.job.train.seq_len} tokens an epoch")
    say("dry run: stopped before the first step; nothing was written")


def _phase(prepared: _Prepared, use: Use) -> str:
    component = prepared.catalog.lookup("parallel_pass", use.qualified_name).component
    assert isinstance(component, PassComponent), "discovery refuses anything else of this kind"
    return component.phase


def _train(prepared: _Prepared, built: _Built, deadline: Deadline) -> ExitCode:
    job, mesh, checkpoint = prepared.job, prepared.mesh, prepared.checkpoint
    if checkpoint is not None:
        restore(checkpoint, built.model, built.optimizer, prepared.callbacks, mesh, prepared.console.line)
        prepared.peers.sign()
    loaded = None
    if prepared.warm_start is not None:
        loaded = load_warm_start(prepared.warm_start, built.model, built.optimizer, mesh, prepared.console.line)
    versions = {plugin.distribution: plugin.version for plugin in prepared.catalog.plugins if plugin.status == "ok"}
    environment = describe_environment(versions, mesh.degrees, str(prepared.device))
    lease = on_all_ranks(lambda: _lease(prepared))
    try:
        attempt = from_first_rank(lambda: lease.attempt if lease else "")
        on_all_ranks(lambda: refuse_unless_shared(prepared.directory.path, attempt))
        on_all_ranks(lambda: _open_directory(prepared, environment))
        mirroring = _mirroring(prepared, lease, deadline)
    except BaseException:
        if lease is not None:
            lease.give_back()
        raise
    _announce(prepared, built, attempt)
    if loaded is not None:
        prepared.directory.write_facts("loaded.json", attrs.asdict(loaded))

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
    trackers = Trackers(
        prepared.build,
        job,
        prepared.directory.path,
        prepared.console.line,
        checkpoint.state().get("trackers", {}) if checkpoint else {},
        active=mesh.rank == 0,
    )

    def record(values: Mapping[str, float]) -> None:
        if mesh.rank == 0:
            prepared.directory.write_metrics(values)
            trackers.log(values)

    saving = _saving(prepared, built, versions, lease, context, trackers, deadline, mirroring)
    replicas = _replicas(prepared)
    rolling_back = _rolling_back(prepared, built, replicas, mirroring)
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
        saving=saving,
        anomalies=rolling_back.anomalies,
        rolling_back=rolling_back,
        record=record,
        step=checkpoint.step if checkpoint else 0,
        replicas=replicas,
        live_parts=LiveParts(
            built.model,
            built.optimizer,
            [(name, one) for name, one in prepared.callbacks if not isinstance(one, Replication)],
        ),
    )
    outcome: str = "failed"
    why: dict[str, Any] = {}
    heeding = ExitStack()
    heeding.enter_context(stop_on_signals(requests, prepared.console.line))
    try:
        by_the_clock = deadline.watched(requests, prepared.console.line) if mesh.rank == 0 else nullcontext()
        with by_the_clock, prepared.peers.lost_ones_named():
            stopped = trainer.run()
        if not stopped:
            outcome = "completed"
            prepared.console.line(f"done: {trainer.step} steps")
            return ExitCode.COMPLETED
        outcome, why = "preempted" if stopped in PREEMPTIONS else "stopped", {"reason": stopped}
        prepared.console.line(f"stopped at step {trainer.step}, saved; the same command continues")
        return ExitCode.STOPPED
    except BaseException as error:
        why = {"error": f"{type(error).__name__}: {error}", "exit_code": exit_code_of(error)}
        lifecycle.call_failed(prepared.console.line, run=context, step=trainer.step, error=error)
        prepared.directory.write_log(f"failed at step {trainer.step}: {type(error).__name__}: {error}")
        raise
    finally:
        loader.close()
        saving.close()
        trackers.close("stopped" if outcome == "preempted" else outcome)
        prepared.directory.write_event(outcome, step=trainer.step, **why)
        prepared.directory.close()
        if lease is not None:
            lease.give_back()
        heeding.close()  # last: a scheduler says the same thing several times, and closing takes its time


def _saving(
    prepared: _Prepared,
    built: _Built,
    versions: Mapping[str, str],
    lease: Lease | None,
    context: RunContext,
    trackers: Trackers,
    deadline: Deadline,
    mirroring: Mirroring | None,
) -> Saving:
    job, directory = prepared.job, prepared.directory
    own = {"forge-core": forge_core.__version__, "torch": torch.__version__}

    def ended(saved: Saved) -> None:
        if saved.error is None:
            times = {"seconds": saved.seconds, "seconds_blocked": saved.seconds_blocked}
            directory.write_event("saved", step=saved.step, **times)
        else:
            directory.write_event("save_failed", step=saved.step, error=str(saved.error))

    def committed(saved: Saved) -> None:
        deadline.must_hold(saved.seconds, prepared.console.line)
        prepared.lifecycle.call("checkpoint_saved", run=context, step=saved.step, path=saved.path)

    return Saving(
        Contents(
            job,
            prepared.mesh,
            built.model,
            built.optimizer,
            prepared.source,
            prepared.vocab_size,
            tuple(prepared.callbacks),
            trackers.states,
            {**own, **versions},
        ),
        Saver(
            prepared.store,
            prepared.device,
            background=job.checkpoint.background,
            timeout=job.checkpoint.timeout,
            may_commit=lease.refuse_if_lost if lease else lambda: None,
        ),
        prepared.peers,
        prepared.store,
        mirroring,
        prepared.console.line,
        ended,
        committed,
    )


def _replicas(prepared: _Prepared) -> Replicas:
    replications = [callback for _, callback in prepared.callbacks if isinstance(callback, Replication)]
    if not replications:
        return Replicas()
    return JoinedReplicas(
        replications[0],
        prepared.job,
        prepared.catalog,
        prepared.mesh,
        prepared.device,
        prepared.loader,
        prepared.peers.patient,
        prepared.console.line,
        prepared.directory.write_event,
    )


def _rolling_back(prepared: _Prepared, built: _Built, replicas: Replicas, mirroring: Mirroring | None) -> RollingBack:
    job, mesh, loader, console, directory = (
        prepared.job,
        prepared.mesh,
        prepared.loader,
        prepared.console,
        prepared.directory,
    )
    state = prepared.checkpoint.state() if prepared.checkpoint else {}

    def load(checkpoint: Checkpoint) -> None:
        built.optimizer.state.clear()
        with prepared.peers.patient(job.run.first_step_timeout):
            restore(checkpoint, built.model, built.optimizer, prepared.callbacks, mesh, console.line)

    return RollingBack(
        job.anomalies,
        mesh,
        prepared.store,
        loader,
        Anomalies(
            job.anomalies,
            mesh,
            prepared.device,
            loader,
            console.line,
            directory.write_event,
            state.get("anomalies"),
            replicas.any_replica,
        ),
        directory,
        console.line,
        load,
        mirroring,
        **state.get("rolling_back", {}),
    )


def _lease(prepared: _Prepared) -> Lease | None:
    """On the first rank: from here on, this run's directory is written to."""
    if prepared.mesh.rank > 0:
        return None
    try:
        return Lease(prepared.directory.path, prepared.console.line, prepared.ended)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {prepared.directory.path}: {error.strerror}") from error


def _open_directory(prepared: _Prepared, environment: Mapping[str, Any]) -> None:
    """On the first rank."""
    if prepared.mesh.rank > 0:
        return
    start, store = prepared.start, prepared.store
    if store.steps() != list(start.seen):
        raise ConfigError(f"{store.path} has changed while this run was being prepared; start it again")
    store.remove_unfinished()
    if start.keeps_until is not None and (aside := store.put_aside(start.keeps_until)):
        prepared.console.line(f"later checkpoints are now in {aside}")
    prepared.directory.open(prepared.job, environment, start.step)  # from here on, its job.toml says it is done


def _mirroring(prepared: _Prepared, lease: Lease | None, deadline: Deadline | None) -> Mirroring | None:
    """After the run's own directory: the mirror's ``job.toml`` says that both are done.

    Raises:
        MirrorError: it cannot be written to, and the run is not to go on without it, or begins only now.
    """
    mirror = _mirror(prepared.job)
    if mirror is None:
        return None
    section, start, say = prepared.job.checkpoint, prepared.start, prepared.console.line
    copier = None
    if lease is not None:
        copier = Copier(
            prepared.store,
            mirror,
            section,
            attempt=lease.attempt,
            job_toml=dump_job(prepared.job),
            start=start.step if start.checkpoint else -1,
            may_commit=lease.refuse_if_lost,
        )

    def take_over() -> None:
        assert copier is not None, "it is there on the first rank"
        try:
            copier.start()
        except MirrorError as error:
            if section.on_failure == "stop" or start.checkpoint is None or start.keeps_until is not None:
                copier.close()
                raise
            say(f"{error}; training goes on, and it is tried again after the next save")

    slowly_from_first_rank(take_over, prepared.peers.sign)
    return Mirroring(
        copier,
        section,
        prepared.peers.sign,
        say,
        prepared.directory.write_event,
        lambda seconds: deadline.must_hold(seconds, say) if deadline else None,
    )


def _complete_mirror(prepared: _Prepared) -> None:
    """Copy what the run could not copy when it ended."""
    if prepared.job.checkpoint.mirror is None:
        return
    lease = on_all_ranks(lambda: _lease(prepared))
    try:
        mirroring = _mirroring(prepared, lease, None)
        assert mirroring is not None, "there is a mirror"
        try:
            mirroring.finish()
        finally:
            mirroring.close()
    finally:
        if lease is not None:
            lease.give_back()


def _announce(prepared: _Prepared, built: _Built, attempt: str) -> None:
    job, checkpoint = prepared.job, prepared.checkpoint
    prepared.directory.write_event(
        "resumed" if checkpoint else "started",
        step=prepared.start.step,
        checkpoint=str(checkpoint.path) if checkpoint else None,
        passed_over=prepared.start.passed_over,
        loaded=str(prepared.warm_start.checkpoint.path) if prepared.warm_start else None,
        mesh=dict(prepared.mesh.degrees),
        attempt=attempt,
    )
    axes = {axis: degree for axis, degree in prepared.mesh.degrees.items() if degree > 1}
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in axes.items()) or "one process"
    prepared.console.line(
        f"{job.run.name}: {_start_words(prepared)}; {built.model.n_parameters:,} parameters, {job.train.precision} on "
        f"{prepared.device.type}, {mesh}; {job.train.steps} steps; files in {prepared.directory.path}"
    )


def _start_words(prepared: _Prepared) -> str:
    checkpoint = prepared.checkpoint
    if checkpoint is None:
        loaded = f" with tensors of {prepared.warm_start.checkpoint.path}" if prepared.warm_start else ""
        return f"fresh start{loaded}"
    is_own = checkpoint.path.parent == prepared.store.path.resolve()
    words = f"resumed from {checkpoint.path.name if is_own else checkpoint.path}"
    if prepared.start.passed_over:
        words += f", as those of steps {', '.join(map(str, prepared.start.passed_over))} are damaged"
    skipped = checkpoint.state().get("anomalies", {}).get("skipped", 0)
    return words + (f", with {skipped} updates left out before" if skipped else "")


def _evaluation(prepared: _Prepared) -> Callable[[], Iterator[Mapping[str, torch.Tensor]]] | None:
    source = prepared.validation
    if source is None:
        return None

    def batches() -> Iterator[Mapping[str, torch.Tensor]]:
        for batch in evaluation_batches(
            source,
            batch_size=prepared.job.train.batch_size,
            dp_rank=prepared.mesh.dp_rank,
            dp_size=prepared.mesh.dp_size,
            batches=prepared.job.eval.batches,
        ):
            prepared.peers.sign()  # there may be more of them than a step has time for
            yield batch

    return batches
