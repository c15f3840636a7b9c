"""One run of a job, on one rank: everything is checked, then built, then restored, then trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import attrs
import torch
import torch.distributed as dist

import forge_core
from forge_core.checkpoint.compatibility import plugins_changed, used_plugins
from forge_core.checkpoint.saver import Saved, Saver
from forge_core.checkpoint.store import Checkpoint
from forge_core.config.sections import Job
from forge_core.contracts.callback import PREEMPTIONS, Requests, RunContext
from forge_core.contracts.data_source import CheckedSource
from forge_core.contracts.replication import Replication
from forge_core.data.loader import evaluation_batches
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.distributed.fingerprint import refuse_unequal_ranks
from forge_core.distributed.mesh import choose_device, join_process_group
from forge_core.distributed.peer_monitor import PeerMonitor
from forge_core.distributed.timeouts import longer_timeouts
from forge_core.errors import ExitCode, ForgeError, exit_code_of
from forge_core.job import job_table
from forge_core.registry.catalog import Catalog
from forge_core.run.directory import RunDirectory, describe_environment
from forge_core.run.fatal import fatal_errors_kept
from forge_core.run.ownership import Ownership, complete, ownership
from forge_core.run.resume import restore
from forge_core.run.setup import RunSetup, begin, prepare
from forge_core.run.signals import stop_on_signals
from forge_core.run.summary import EndReport, announce, announce_complete, describe
from forge_core.run.time_limit import TimeLimit
from forge_core.run.trackers import Trackers
from forge_core.run.warm_start import load_warm_start
from forge_core.train.build import BuiltModel, build_model, build_optimizer
from forge_core.train.evaluation import Evaluation
from forge_core.train.metrics import Metrics, peak_flops
from forge_core.train.replication import JoinedReplicas, Replicas
from forge_core.train.rollback import Rollback
from forge_core.train.saving import Contents, Saving
from forge_core.train.state_transfer import StateTransfer
from forge_core.train.step_guard import NonFiniteSearch, StepGuard
from forge_core.train.trainer import Trainer


def run_job(
    job: Job,
    catalog: Catalog,
    *,
    dry_run: bool = False,
    heeding: ExitStack | None = None,
    command: str | None = None,
) -> ExitCode:
    """Run ``job`` in this process, which is one rank of the group that the environment describes, or a group of one.

    Args:
        heeding: signals are heeded until this is closed, to the end of the process perhaps: a scheduler says the same
            thing several times, and closing takes its time. By default, until the run ends.
        command: what was typed, if this is known, for ``environment.json``.

    Returns:
        COMPLETED or STOPPED.

    Raises:
        ForgeError: its ``exit_code`` says how the process should end. Nothing has been written if it is INVALID, but
            for a checkpoint that was fetched from the mirror.
    """
    started = time.monotonic()
    device = choose_device(job.run.device)
    join_process_group(device, job.run.first_step_timeout)
    peers = PeerMonitor(job.run, RunDirectory(job, writes=False).path)
    try:
        with peers.naming_lost_ranks():
            if heeding is not None:
                return _run(job, catalog, device, peers, started, dry_run, heeding, command)
            with ExitStack() as own:
                return _run(job, catalog, device, peers, started, dry_run, own, command)
    finally:
        dist.destroy_process_group()
        peers.close()


def _run(
    job: Job,
    catalog: Catalog,
    device: torch.device,
    peers: PeerMonitor,
    started: float,
    dry_run: bool,
    heeding: ExitStack,
    command: str | None,
) -> ExitCode:
    run_on_all_ranks(lambda: refuse_unequal_ranks(job, catalog))
    begun = run_on_all_ranks(lambda: begin(job, catalog, device, peers, dry_run=dry_run))
    peers.beat()
    if begun.is_complete:
        announce_complete(begun)
        if not dry_run:
            complete(begun)
        return ExitCode.COMPLETED
    prepared = run_on_all_ranks(lambda: prepare(begun))
    peers.beat()
    deadline = run_on_all_ranks(lambda: TimeLimit(job.run, started))
    built = run_on_all_ranks(lambda: _build(prepared))
    peers.beat()
    if dry_run:
        describe(prepared, built.model)
        return ExitCode.COMPLETED
    return _train(prepared, built, deadline, heeding, command)


@attrs.frozen
class _Built:
    model: BuiltModel
    optimizer: torch.optim.Optimizer


def _build(prepared: RunSetup) -> _Built:
    model = build_model(
        prepared.job, prepared.vocab_size, prepared.mesh, prepared.device, prepared.passes, prepared.build
    )
    return _Built(model, build_optimizer(prepared.job, model, prepared.build))


def _train(prepared: RunSetup, built: _Built, deadline: TimeLimit, heeding: ExitStack, command: str | None) -> ExitCode:
    mesh, checkpoint = prepared.mesh, prepared.checkpoint
    if checkpoint is not None:
        restore(checkpoint, built.model, built.optimizer, prepared.callbacks, mesh, prepared.console.line)
        prepared.peers.beat()
    loaded = None
    if prepared.warm_start is not None:
        loaded = load_warm_start(prepared.warm_start, built.model, built.optimizer, mesh, prepared.console.line)
    versions = {plugin.distribution: plugin.version for plugin in prepared.catalog.plugins if plugin.status == "ok"}
    environment = {}
    if mesh.rank == 0:
        environment = describe_environment(versions, mesh.degrees, str(prepared.device), command)
    deadline.learn(prepared.directory.events(), prepared.console.line)
    with (
        ownership(prepared, environment, deadline) as held,
        fatal_errors_kept(prepared.directory.path, mesh.rank),
    ):
        announce(prepared, built.model, held.attempt)
        if loaded is not None:
            prepared.directory.write_facts("loaded.json", attrs.asdict(loaded))
        return _train_there(prepared, built, versions, deadline, held, heeding)


def _train_there(
    prepared: RunSetup,
    built: _Built,
    versions: Mapping[str, str],
    deadline: TimeLimit,
    held: Ownership,
    heeding: ExitStack,
) -> ExitCode:
    job, mesh, checkpoint = prepared.job, prepared.mesh, prepared.checkpoint
    trackers = Trackers(
        prepared.build,
        job,
        prepared.directory.path,
        prepared.console.line,
        checkpoint.state().get("trackers", {}) if checkpoint else {},
        active=mesh.rank == 0,
    )
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
        track_series=trackers.log_series,
        sum_over_stages=lambda tensor: mesh.sum_over(tensor, ("pp",)),
    )
    lifecycle = prepared.lifecycle
    loader = prepared.loader
    end_report = EndReport(prepared)

    def record(values: Mapping[str, float]) -> None:
        if mesh.rank == 0:
            end_report.note(values)
            prepared.directory.write_metrics(values)
            trackers.log(values)

    saving = _saving(prepared, built, versions, held, context, trackers, deadline)
    replicas = _replicas(prepared)
    rollback = _rollback(prepared, built, replicas)
    trainer = Trainer(
        job=job,
        mesh=mesh,
        device=prepared.device,
        parts=built.model.parts,
        executor=built.model.executor,
        optimizer=built.optimizer,
        schedule=prepared.schedule,
        loader=loader,
        evaluation=_evaluation(prepared, built.model),
        measurement=Metrics(
            prepared.device,
            built.model.flops_per_token,
            peak_flops(prepared.device),
            mesh.world_size,
        ),
        lifecycle=lifecycle,
        context=context,
        saving=saving,
        anomalies=rollback.anomalies,
        rollback=rollback,
        loss=built.model.loss,
        record=record,
        optimizer_words=prepared.build.words_for(job.optimizer),
        step=checkpoint.step if checkpoint else 0,
        is_resumed=checkpoint is not None,
        accumulation_asked_for=prepared.accumulation_asked_for,
        replicas=replicas,
        live_parts=StateTransfer(
            built.model,
            built.optimizer,
            [(name, one) for name, one in prepared.callbacks if not isinstance(one, Replication)],
        ),
    )
    outcome: str = "failed"
    why: dict[str, Any] = {}
    heeding.enter_context(stop_on_signals(requests, prepared.console.line))
    try:

        def stopping(lead: float) -> None:
            prepared.directory.write_event("stopping", step=trainer.step, lead=lead)

        by_the_clock = deadline.watched(requests, prepared.console.line, stopping) if mesh.rank == 0 else nullcontext()
        _watch_data(prepared, lambda: trainer.step)
        with by_the_clock, prepared.peers.naming_lost_ranks():
            stopped = trainer.run()
        if not stopped:
            outcome = "completed"
            prepared.console.line(end_report.line(trainer.step))
            return ExitCode.COMPLETED
        outcome, why = "preempted" if stopped in PREEMPTIONS else "stopped", {"reason": stopped}
        prepared.console.line(f"stopped at step {trainer.step}, saved; the same command continues")
        return ExitCode.STOPPED
    except BaseException as error:
        why = {"error": f"{type(error).__name__}: {error}", "exit_code": exit_code_of(error)}
        _note_versions(prepared, trainer.step, error)
        lifecycle.call_failed(prepared.console.line, run=context, step=trainer.step, error=error)
        prepared.directory.write_log(f"failed at step {trainer.step}: {type(error).__name__}: {error}")
        raise
    finally:
        requests.stop = requests.stop or outcome  # nobody can ask for more
        loader.close()
        saving.close()
        trackers.close("stopped" if outcome == "preempted" else outcome)
        prepared.directory.write_event(outcome, step=trainer.step, **why)


def _note_versions(prepared: RunSetup, step: int, error: BaseException) -> None:
    """Add a note to an error right after a resume: state may be of another version."""
    checkpoint = prepared.checkpoint
    if checkpoint is None or step > checkpoint.step + 1 or isinstance(error, ForgeError):
        return
    used = used_plugins(job_table(prepared.job))
    if changed := plugins_changed(checkpoint.manifest.versions, used):
        error.add_note(
            f"{checkpoint.path.name} was saved with {', '.join(changed)}; state that has another name or meaning now "
            "needs a state_version and a load_state in the component. With the versions of then, the run goes on."
        )


def _watch_data(prepared: RunSetup, step: Callable[[], int]) -> None:
    """Files that turn out to be damaged while they are read are told; whether to go on is for a person to say."""
    if prepared.mesh.rank > 0:
        return

    def report(sentence: str) -> None:
        prepared.console.line(f"data: {sentence}")
        prepared.directory.write_event("data_damaged", step=step(), error=sentence)

    separate = prepared.validation if prepared.job.eval.data is not None else None
    sources: tuple[object, ...] = (prepared.source, separate)
    for source in sources:
        if isinstance(source, CheckedSource):
            source.watch(report)


def _saving(
    prepared: RunSetup,
    built: _Built,
    versions: Mapping[str, str],
    held: Ownership,
    context: RunContext,
    trackers: Trackers,
    deadline: TimeLimit,
) -> Saving:
    job, directory = prepared.job, prepared.directory
    own = {"forge-core": forge_core.__version__, "torch": torch.__version__}

    def ended(saved: Saved) -> None:
        if saved.error is None:
            times = {"seconds": saved.seconds, "seconds_blocked": saved.seconds_blocked}
            directory.write_event("saved", step=saved.step, **times)
        else:
            directory.write_event("save_failed", step=saved.step, error=str(saved.error))

    def may_commit() -> None:
        directory.sync()  # a run that is said to be saved has its history up to there
        held.refuse_if_lost()

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
            may_commit=may_commit,
        ),
        prepared.peers,
        prepared.store,
        prepared.mirror,
        prepared.console.line,
        ended,
        committed,
    )


def _replicas(prepared: RunSetup) -> Replicas:
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


def _rollback(prepared: RunSetup, built: _Built, replicas: Replicas) -> Rollback:
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
        restore(checkpoint, built.model, built.optimizer, prepared.callbacks, mesh, console.line)

    @contextmanager
    def patiently() -> Iterator[None]:
        with prepared.peers.patient(job.run.first_step_timeout), longer_timeouts(job.run):
            yield

    return Rollback(
        job.anomalies,
        mesh,
        prepared.store,
        loader,
        StepGuard(
            job.anomalies,
            mesh,
            prepared.device,
            loader,
            console.line,
            directory.write_event,
            state.get("anomalies"),
            replicas.any_replica,
            NonFiniteSearch(built.model, prepared.catalog, loader, prepared.device),
        ),
        directory,
        console.line,
        load,
        patiently,
        prepared.mirror,
        **state.get("rolling_back", {}),
    )


def _evaluation(prepared: RunSetup, model: BuiltModel) -> Evaluation | None:
    source, job = prepared.validation, prepared.job
    if source is None:
        return None
    assert job.train.global_batch_size is not None, "it has been resolved"
    samples = job.eval.batches * job.train.global_batch_size

    def batches() -> Iterator[Mapping[str, torch.Tensor]]:
        for batch in evaluation_batches(
            source,
            batch_size=job.train.batch_size,
            dp_rank=prepared.mesh.dp_rank,
            dp_size=prepared.mesh.dp_size,
            samples=samples,
        ):
            prepared.peers.beat()  # there may be more of them than a step has time for
            yield batch

    return Evaluation(batches, model, prepared.mesh, prepared.device)
