"""One run of a job, on one rank: everything is checked, then built, then restored, then trained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import forge_core
from forge_core.checkpoint.compatibility import versions_changed
from forge_core.checkpoint.saver import Saver
from forge_core.checkpoint.store import Checkpoint
from forge_core.config.sections import Job
from forge_core.contracts.callback import PREEMPTIONS, Requests, RunContext
from forge_core.contracts.data_source import CheckedSource
from forge_core.contracts.observer import BadStep, Origin
from forge_core.contracts.parallel_pass import PassContext
from forge_core.contracts.phase_plan import DEFAULT as PHASE_PLAN
from forge_core.contracts.phase_plan import PhasePlan
from forge_core.contracts.replication import Replication
from forge_core.contracts.supervisor import Supervisor
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.distributed.consensus import Consensus
from forge_core.distributed.dissemination import disseminate
from forge_core.distributed.fingerprint import refuse_unequal_ranks
from forge_core.distributed.installed import build_supervisor
from forge_core.distributed.mesh import choose_device, join_process_group
from forge_core.errors import ConfigError, ExitCode, ForgeError, exit_code_of, noting
from forge_core.job import job_table
from forge_core.ops.local_tensor import local_tensor
from forge_core.registry.catalog import Catalog
from forge_core.run.directory import RunDirectory, describe_environment
from forge_core.run.fatal import fatal_errors_kept
from forge_core.run.ownership import Ownership, complete, ownership
from forge_core.run.resume import restore, restore_tensors
from forge_core.run.setup import RunSetup, begin, prepare
from forge_core.run.signals import stop_on_signals
from forge_core.run.summary import EndReport, announce, announce_complete, describe
from forge_core.run.time_limit import TimeLimit
from forge_core.run.trackers import Trackers
from forge_core.train.build import Built, BuiltModel, build_model, build_optimizer
from forge_core.train.evaluation import Evaluations
from forge_core.train.evaluation_weights import EvaluationWeights
from forge_core.train.metrics import Metrics
from forge_core.train.model_evaluator import ModelEvaluator
from forge_core.train.replication import JoinedReplicas, Replicas
from forge_core.train.rollback import Rollback
from forge_core.train.run import Reports, Run
from forge_core.train.saving import Contents, Saving
from forge_core.train.sources import entries_of
from forge_core.train.step_guard import StepGuard
from forge_core.train.step_modules import StepModules
from forge_core.train.trainer import Trainer


def run_job(
    job: Job,
    catalog: Catalog,
    *,
    dry_run: bool = False,
    until_the_end: ExitStack | None = None,
    command: str | None = None,
) -> ExitCode:
    """Run ``job`` in this process, which is one rank of the group that the environment describes, or a group of one.

    Args:
        until_the_end: signals are heeded until this is closed, perhaps at the end of the process: a scheduler says the
            same thing several times, and closing takes its time. By default, until the run ends.
        command: what was typed, if this is known, for ``environment.json``.

    Returns:
        COMPLETED or STOPPED.

    Raises:
        ForgeError: its ``exit_code`` says how the process should end. Nothing has been written if it is INVALID, but
            for a checkpoint that was fetched from the mirror.
    """
    started = time.monotonic()
    signals = ExitStack() if until_the_end is None else nullcontext(until_the_end)
    with _connected(job, catalog) as (device, peers), signals as heeded:
        begun = run_on_all_ranks(lambda: begin(job, catalog, device, peers, dry_run=dry_run))
        peers.beat()
        if begun.is_complete:
            announce_complete(begun)
            if not dry_run:
                complete(begun)
            return ExitCode.COMPLETED
        setup = run_on_all_ranks(lambda: prepare(begun))
        time_limit = run_on_all_ranks(lambda: TimeLimit(job.run, started))
        peers.beat()
        built = run_on_all_ranks(lambda: _build(setup))
        peers.beat()
        if dry_run:
            describe(setup, built.model)
            return ExitCode.COMPLETED
        loaded = _restore(setup, built)
        time_limit.learn(setup.directory.events(), setup.console.line)
        with (
            ownership(setup, _environment(setup, built.model, command), time_limit, _bytes_of(built)) as held,
            fatal_errors_kept(setup.directory.path, setup.mesh.rank),
        ):
            requests = Requests()
            heeded.enter_context(stop_on_signals(requests, setup.console.line))  # a start that is told has its end told
            announce(setup, built.model, held.attempt)
            if loaded:
                setup.directory.write_facts("loaded.json", loaded)
            return _Training(setup, built, time_limit, held, requests).run()


@contextmanager
def _connected(job: Job, catalog: Catalog) -> Iterator[tuple[torch.device, Supervisor]]:
    """Join the other ranks."""
    device = choose_device(job.run.device)
    join_process_group(device, job.run.first_step_timeout)
    peers = Supervisor()
    try:
        run_on_all_ranks(lambda: refuse_unequal_ranks(job, catalog))
        run_directory = RunDirectory(job, writes=False).path
        peers = run_on_all_ranks(lambda: build_supervisor(catalog, job.run, run_directory))
        with peers.naming_lost_ranks():
            yield device, peers
            disseminate()  # rank 0 keeps the store, in which others may look for a rank they have not talked to yet
    finally:
        dist.destroy_process_group()
        peers.close()


def _build(setup: RunSetup) -> Built:
    job, build = setup.job, setup.build
    context = PassContext(setup.mesh, job, setup.device, entries=setup.entries)
    model = build_model(context, setup.vocab_size, setup.passes, build)
    for one in setup.evaluations:
        look_at = noting(f"raised by {one.words}")(one.evaluation.look_at)
        run_on_all_ranks(partial(look_at, model.parts, setup.mesh, job))  # before the next one, in which ranks may meet
    model.loss.refuse_entries(entries := entries_of(setup.source, setup.job.train.seq_len))
    if job.checkpoint.best_metric == "eval/perplexity" and not model.loss.has_perplexity(entries):
        raise ConfigError(f"checkpoint.best_metric: {model.loss.words} has no perplexity; choose eval/loss")
    phases = PhasePlan(model.known)
    if job.phases:
        phases = build(build.resolve("phase_plan", PHASE_PLAN), job=job, parameters=model.parameters, known=model.known)
    if job.checkpoint.frozen == "once" and not phases.always_frozen:
        raise ConfigError('checkpoint.frozen: "once" has no effect, as each parameter is trained; remove it')
    return Built(model, build_optimizer(job, model, build), phases)


def _restore(setup: RunSetup, built: Built) -> Mapping[str, Any]:
    """From the run's checkpoint; or from other runs' tensors, of which it returns the fate of each."""
    if setup.checkpoint is not None:
        restore(setup.checkpoint, built.model, built.optimizer, setup.callbacks, setup.mesh, setup.console.line)
        setup.peers.beat()
    return setup.warm_start.load(built.model, built.optimizer, setup.mesh) if setup.warm_start else {}


def _versions(setup: RunSetup) -> dict[str, str]:
    """The versions of our packages and the plugins."""
    return {plugin.distribution: plugin.version for plugin in setup.catalog.plugins if plugin.status == "ok"}


def _environment(setup: RunSetup, model: BuiltModel, command: str | None) -> dict[str, Any]:
    """For ``environment.json``, on rank 0."""
    if setup.mesh.rank > 0:
        return {}
    facts = describe_environment(_versions(setup), setup.mesh.degrees, str(setup.device), command)
    return facts | {"n_parameters": model.n_parameters, "flops_per_token": model.flops_per_token}


def _bytes_of(built: Built) -> int:
    """Bytes that this rank has of what is saved. An optimizer without state is taken to have two tensors of each."""
    own = [local_tensor(tensor).nbytes for tensor in built.model.tensors().values()]
    leaves = [one for one in tree_leaves([*built.optimizer.state.values()]) if isinstance(one, torch.Tensor)]
    return sum(own) + (sum(local_tensor(one).nbytes for one in leaves) or 2 * sum(own))


class _Training:
    """The services of the training loop, each built from those before it."""

    def __init__(self, setup: RunSetup, built: Built, limit: TimeLimit, held: Ownership, requests: Requests) -> None:
        self._setup = setup
        self._time_limit, self._held, self._requests = limit, held, requests
        self._saved = setup.checkpoint.state() if setup.checkpoint else {}
        self._end_report = EndReport(setup)
        say, kept, active = setup.console.line, self._saved.get("trackers", {}), setup.mesh.rank == 0
        self._trackers = Trackers(setup.build, setup.job, setup.directory.path, say, kept, active=active)
        owners = [(setup.build.words_for(setup.job.optimizer), built.optimizer), *setup.callbacks]
        self._evaluation_weights = EvaluationWeights(built.model, owners)
        self._run = self._make_run(built)
        self._trainer = self._make_trainer(built)

    def run(self) -> ExitCode:
        """Train, and say how it ended."""
        setup, run, trainer = self._setup, self._run, self._trainer
        directory, console = setup.directory, setup.console
        outcome: str = "failed"
        why: dict[str, Any] = {}
        try:
            self._watch_data()
            with self._stopping_in_time(), setup.peers.naming_lost_ranks():
                stopped = trainer.train(save_first=setup.checkpoint is None)
            if not stopped:
                outcome = "completed"
                console.line(self._end_report.line(trainer.step))
                return ExitCode.COMPLETED
            outcome, why = "preempted" if stopped in PREEMPTIONS else "stopped", {"reason": stopped}
            console.line(f"stopped at step {trainer.step}, saved; the same command continues")
            return ExitCode.STOPPED
        except BaseException as error:
            why = {"error": f"{type(error).__name__}: {error}", "exit_code": exit_code_of(error)}
            _note_versions(setup, trainer.step, error)
            run.events.call_failed(console.line, run=run.context, step=trainer.step, error=error)
            directory.write_log(f"failed at step {trainer.step}: {type(error).__name__}: {error}")
            raise
        finally:
            run.requests.stop = run.requests.stop or outcome  # no more can be asked for
            setup.loader.close()
            trainer.saving.close()
            directory.write_event(outcome, step=trainer.step, **why)  # trackers may take so long that they are left
            self._trackers.close("stopped" if outcome == "preempted" else outcome)

    def _stopping_in_time(self) -> AbstractContextManager[None]:
        """One rank looks at the clock."""
        setup, trainer = self._setup, self._trainer
        if setup.mesh.rank > 0:
            return nullcontext()

        def stopping(lead: float) -> None:
            setup.directory.write_event("stopping", step=trainer.step, lead=lead)

        return self._time_limit.watched(self._run.requests, setup.console.line, stopping)

    def _watch_data(self) -> None:
        """Files that turn out to be damaged while they are read are told; whether to go on is for a person to say."""
        setup, trainer = self._setup, self._trainer
        if setup.mesh.rank > 0:
            return

        def report(sentence: str) -> None:
            setup.console.line(f"data: {sentence}")
            setup.directory.write_event("data_damaged", step=trainer.step, error=sentence)

        for source in (setup.source, *setup.evaluated):
            if isinstance(source, CheckedSource):
                source.watch(report)

    def _make_run(self, built: Built) -> Run:
        setup, mesh = self._setup, self._setup.mesh
        requests, reports = self._requests, Reports()
        context = RunContext(
            job=setup.job,
            run_dir=setup.directory.path,
            rank=mesh.rank,
            world_size=mesh.world_size,
            device=setup.device,
            parts=built.model.parts,
            optimizer=built.optimizer,
            total_steps=setup.job.train.steps,
            requests=requests,
            log=setup.console.line,
            parameters=built.model.parameters,
            mesh=mesh,
            tokenizer=setup.source.tokenizer,
            report=reports.add,
            track_series=self._trackers.log_series,
            track_figure=self._trackers.log_figure,
            sum_over_stages=lambda tensor: mesh.sum_over(tensor, ("pp",)),
            write_event=setup.directory.write_event,
            patient=setup.peers.patient,
        )
        return Run(
            context=context,
            mesh=mesh,
            directory=setup.directory,
            loader=setup.loader,
            events=setup.events,
            supervisor=setup.peers,
            consensus=Consensus(requests, setup.device),
            record=self._record,
            reports=reports,
        )

    def _record(self, values: Mapping[str, float]) -> None:
        if self._setup.mesh.rank == 0:
            self._end_report.note(values)
            self._setup.directory.write_metrics(values)
            self._trackers.log(values)

    def _make_trainer(self, built: Built) -> Trainer:
        run, setup = self._run, self._setup
        modules = StepModules(built.model.parts, setup.mesh)
        replicas = self._make_replicas()

        def examine(start: int) -> Origin | None:
            bad = BadStep(run.loader.step_at(start), built.model.executor.evaluate, [*built.model.roles])
            return next(filter(None, run.emit("find_origin", bad=bad)), None)

        guard = StepGuard(run, self._saved.get("anomalies"), replicas.any_replica, examine)
        metrics = Metrics(run, built.model, modules, guard)
        rollback = self._make_rollback(built, guard)
        return Trainer(
            run=run,
            built=built,
            schedule=setup.schedule,
            step_modules=modules,
            evaluations=self._make_evaluations(built, metrics),
            metrics=metrics,
            guard=guard,
            rollback=rollback,
            saving=self._make_saving(built, rollback, metrics, replicas),
            replicas=replicas,
            restore_callbacks=self._restore_callbacks,
            step=setup.start.step,
        )

    def _restore_callbacks(self) -> None:
        setup = self._setup
        if setup.checkpoint is not None:
            restore_tensors(setup.checkpoint, setup.callbacks, setup.mesh, setup.console.line)
            setup.checkpoint.forget_tensors()  # training may take weeks
        self._evaluation_weights.by_name()  # what is wrong with them is known before the first step

    def _make_evaluations(self, built: Built, metrics: Metrics) -> Evaluations:
        run, setup = self._run, self._setup

        def after_batch(batch: Mapping[str, torch.Tensor]) -> bool:
            setup.peers.beat()  # there may be more batches than a step has time for
            run.emit("eval_batch", step=self._trainer.step, batch=batch)
            return run.consensus.any_rank(bool(run.requests.stop))

        context = PassContext(setup.mesh, setup.job, setup.device)
        in_place = self._evaluation_weights.in_place
        made = ModelEvaluator(context, built.model, setup.source.tokenizer, setup.console.line, after_batch, in_place)
        return Evaluations(run, made, setup.validation, setup.evaluations, metrics)

    def _make_replicas(self) -> Replicas:
        found = [callback for _, callback in self._setup.callbacks if isinstance(callback, Replication)]
        return JoinedReplicas(found[0], self._run, self._setup.catalog) if found else Replicas()

    def _make_rollback(self, built: Built, guard: StepGuard) -> Rollback:
        setup = self._setup

        def reload(checkpoint: Checkpoint) -> None:
            built.optimizer.state.clear()
            restore(checkpoint, built.model, built.optimizer, setup.callbacks, setup.mesh, setup.console.line)
            restore_tensors(checkpoint, setup.callbacks, setup.mesh, setup.console.line, "stay as they are")

        return Rollback(self._run, setup.store, setup.mirror, guard, reload, **self._saved.get("rolling_back", {}))

    def _make_saving(self, built: Built, rollback: Rollback, metrics: Metrics, replicas: Replicas) -> Saving:
        setup, checkpoint = self._setup, self._setup.job.checkpoint
        contents = Contents(
            run=self._run,
            built=built,
            rollback=rollback,
            vocab_size=setup.vocab_size,
            callbacks=tuple(setup.callbacks),
            evaluation_weights=self._evaluation_weights,
            tracker_states=self._trackers.states,
            versions={"forge-core": forge_core.__version__, "torch": torch.__version__, **_versions(setup)},
            accumulation_asked_for=setup.accumulation_asked_for,
        )
        return Saving(
            run=self._run,
            contents=contents,
            saver=Saver(
                setup.store,
                setup.device,
                background=checkpoint.background,
                timeout=checkpoint.timeout,
                may_commit=self._held.refuse_if_lost,
                known=setup.checkpoint.path if setup.checkpoint else None,
            ),
            store=setup.store,
            mirror=setup.mirror,
            metrics=metrics,
            replicas=replicas,
            committed=lambda saved: self._time_limit.must_hold(saved.seconds, setup.console.line),
            saved_step=setup.start.step,
        )


def _note_versions(setup: RunSetup, step: int, error: BaseException) -> None:
    """Add a note to an error right after a resume: state may be of another version."""
    checkpoint = setup.checkpoint
    if checkpoint is None or step > checkpoint.step + 1 or isinstance(error, ForgeError):
        return
    if changed := versions_changed(checkpoint.manifest.versions, job_table(setup.job)):
        error.add_note(
            f"{checkpoint.path.name} was saved with {', '.join(changed)}; state that has another name or meaning now "
            "needs a state_version and a load_state in the component. With the versions of then, the run may go on."
        )
