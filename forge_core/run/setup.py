"""Set-up of a run, before anything large is built or anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import torch

from forge_core.checkpoint.contents import resume_problem
from forge_core.checkpoint.frozen_files import refuse_without_links
from forge_core.checkpoint.run_mirror import NoMirror, mirror_of
from forge_core.checkpoint.store import Checkpoint, CheckpointStore
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.batch import Entry
from forge_core.contracts.callback import Callback
from forge_core.contracts.checkpoint_mirror import MirrorContext
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.data_source import DataSource, Source
from forge_core.contracts.scheduler import Schedule
from forge_core.contracts.supervisor import Supervisor
from forge_core.contracts.warm_start import DEFAULT as WARM_START
from forge_core.contracts.warm_start import WarmStart
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0, run_slowly_on_rank0
from forge_core.distributed.installed import installed_observers
from forge_core.distributed.mesh import Mesh, build_mesh
from forge_core.distributed.timeouts import Timeouts
from forge_core.errors import noting
from forge_core.job import adding_passes, check_device, sort_passes
from forge_core.registry.catalog import Catalog
from forge_core.run.console import Console
from forge_core.run.directory import RunDirectory
from forge_core.run.global_batch import with_global_batch
from forge_core.run.lease import Sign, refuse_if_held
from forge_core.run.resume import Start, choose_start, refuse_if_gone, refuse_if_incompatible, resume_asked_for
from forge_core.train.build import choose_vocab_size
from forge_core.train.component_checks import checked_schedule
from forge_core.train.evaluation import NamedEvaluation, build_evaluations
from forge_core.train.events import Events, mistaken_events
from forge_core.train.replication import refuse_unfit_replications
from forge_core.train.sources import EvaluatedData, data_seed, entries_of, open_source


@attrs.frozen(kw_only=True)
class Begun:
    """Where a run begins, before anything is asked that a run which has all its steps need not answer."""

    job: Job
    catalog: Catalog
    device: torch.device
    mesh: Mesh
    peers: Supervisor
    directory: RunDirectory
    store: CheckpointStore
    mirror: NoMirror
    start: Start
    ended: Sign | None
    console: Console

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.start.checkpoint

    @property
    def is_complete(self) -> bool:
        return self.start.step == self.job.train.steps and not self.start.is_elsewhere


@attrs.frozen(kw_only=True)
class RunSetup(Begun):
    """With the components of the run."""

    build: ComponentBuilder
    passes: Sequence[ComponentRef]
    source: Source
    loader: BatchLoader
    validation: DataSource | None
    evaluations: Sequence[NamedEvaluation]
    evaluated: Sequence[Source]
    """Sources that are evaluated and not trained on."""
    entries: Mapping[str, Entry | None]
    """Entries of batches, for training and evaluation; ``None`` for one without a description."""
    vocab_size: int
    schedule: Schedule
    callbacks: Sequence[tuple[str, Callback]]
    events: Events
    warm_start: WarmStart | None
    accumulation_asked_for: int
    """``train.grad_accumulation`` before ``with_global_batch``."""


def begin(job: Job, catalog: Catalog, device: torch.device, peers: Supervisor, *, dry_run: bool) -> Begun:
    """Called by all ranks alike.

    Raises:
        ConfigError: the run cannot begin; whose fault it is, and what to change.
        MirrorError: the mirror cannot be asked, and the run is not to go on without it.
    """
    mesh = build_mesh(job, device)
    directory = RunDirectory(job, writes=mesh.rank == 0)
    console = Console(speaks=mesh.rank == 0, record=directory.write_log)
    store = CheckpointStore(directory.checkpoints, problem_of=resume_problem)
    # ranks talk to each other here, so it comes before anything that may fail on one of them alone
    ended = run_on_rank0(lambda: refuse_if_held(directory.path))
    mirror = NoMirror()
    if job.checkpoint.mirror is not None and dry_run:
        console.line("dry run: goes by the checkpoints that are here; those at checkpoint.mirror are not fetched")
    elif (use := job.checkpoint.mirror) is not None:
        context = MirrorContext(
            run_name=str(job.run.name),
            folder=store.path,
            section=job.checkpoint,
            rank=mesh.rank,
            say=console.line,
            run_on_rank0=lambda work: run_slowly_on_rank0(work, peers.beat),
        )
        mirror = run_on_all_ranks(lambda: mirror_of(use, context, ComponentBuilder(catalog)))
    last_job = mirror.last_job() or directory.last_job()
    resume = run_on_rank0(lambda: resume_asked_for(job, last_job, console.line))
    found = CheckpointStore(store.path, mirror, resume_problem)
    start = choose_start(resume, found, console.line, directory.events())
    if start.checkpoint is None and start.keeps_until is None and not (dry_run and job.checkpoint.mirror):
        run_on_rank0(lambda: refuse_if_gone(store.path, directory.events()))
    if mesh.world_size > 1 and type(peers) is Supervisor:
        console.line("no supervisor is installed: a rank that is lost is not named, and exit code 5 is not given")
    return Begun(
        job=job,
        catalog=catalog,
        device=device,
        mesh=mesh,
        peers=peers,
        directory=directory,
        store=store,
        mirror=mirror,
        start=start,
        ended=ended,
        console=console,
    )


def prepare(begun: Begun) -> RunSetup:
    """Called by all ranks alike. Nothing large is built, and nothing is written.

    Raises:
        ConfigError: as ``begin``.
    """
    job, catalog, device, mesh, peers = begun.job, begun.catalog, begun.device, begun.mesh, begun.peers
    console, checkpoint = begun.console, begun.checkpoint
    build = ComponentBuilder(catalog)
    warm_start: WarmStart | None = None
    if checkpoint is None and job.checkpoint.loads:
        warm_start = build(build.resolve("warm_start", WARM_START), job=job, catalog=catalog, say=console.line)
        warm_start.choose()
    accumulation_asked_for = job.train.grad_accumulation or 1
    job = with_global_batch(job, mesh.dp_size, checkpoint, console.line)
    # what a component refuses on one device and not on another is known now that `auto` is
    check_device(attrs.evolve(job, run=attrs.evolve(job.run, device=cast("Any", device.type))), catalog)
    source = open_source(job, job.data, "data", "train", build, peers.beat)
    if warm_start is not None:
        warm_start.look_at(source.tokenizer)
    begun.directory.refuse_if_unwritable()
    if job.checkpoint.frozen == "once":
        run_on_rank0(lambda: refuse_without_links(begun.store.path))
    if checkpoint is not None:
        refuse_if_incompatible(job, source, checkpoint, build, adding_passes(job, catalog), console.line)
    evaluated = EvaluatedData(job, source, build, peers.beat)
    validation = evaluated(job.eval.data, "eval.data") if job.eval.interval else None
    evaluations = build_evaluations(job, build, evaluated, source.tokenizer)
    callbacks = [(f"plugin.{use.provider}.callback.{use.name}", build(use)) for use in job.callbacks]
    refuse_unfit_replications(callbacks, source)
    installed = installed_observers(catalog)
    observers = [(f"observer {use.qualified_name}", build(use, catalog=catalog)) for use in installed]
    loader = _loader(job, source, begun)
    with noting(f"raised by {build.words_for(job.data)}"):
        entries = {**entries_of(source, job.train.seq_len), **evaluated.entries}
    is_supervised = mesh.world_size > 1 or job.run.supervisor is not None
    named = zip(map(build.words_for, job.callbacks), (callback for _, callback in callbacks), strict=True)
    for line in mistaken_events(named):
        console.line(f"warning: {line}")
    events = Events(
        [
            *([("timeouts", Timeouts(job.run)), ("supervisor", peers)] if is_supervised else []),
            ("console", console),
            *(("progress bar", bar) for bar in console.progress()),
            *observers,
            *((f"callbacks[{index}] {name}", one) for index, (name, one) in enumerate(callbacks)),
        ]
    )
    peers.calling = lambda: events.calling
    assert job.train.global_batch_size, "set by with_global_batch"
    tokens_per_step = job.train.global_batch_size * job.train.seq_len
    return RunSetup(
        **{**attrs.asdict(begun, recurse=False), "job": job},
        build=build,
        passes=sort_passes(job, catalog),
        source=source,
        loader=loader,
        validation=validation,
        evaluations=evaluations,
        evaluated=evaluated.opened,
        entries=entries,
        vocab_size=choose_vocab_size(job, source),
        schedule=checked_schedule(
            build(job.scheduler, total_steps=job.train.steps, tokens_per_step=tokens_per_step),
            build.words_for(job.scheduler),
            job.train.steps,
        ),
        callbacks=callbacks,
        events=events,
        warm_start=warm_start,
        accumulation_asked_for=accumulation_asked_for,
    )


def _loader(job: Job, source: Source, begun: Begun) -> BatchLoader:
    train, config = job.train, job.data.config
    state = begun.checkpoint.state() if begun.checkpoint else {}
    stream = SampleStream(source, seed=data_seed(job), shuffle=config.shuffle, left_out=state.get("left_out", ()))
    if stream.streams is not None and state:
        stream.streams.restart(**state["streams"])
    loader = BatchLoader(
        stream,
        position=state.get("position", 0),
        batch_size=train.batch_size,
        grad_accumulation=train.grad_accumulation or 1,
        dp_rank=begun.mesh.dp_rank,
        dp_size=begun.mesh.dp_size,
        workers=config.workers,
        prefetch=config.prefetch,
        pin_memory=begun.device.type == "cuda",
    )
    if stream.streams is not None and not state:
        list(loader.step_at(0))  # one without a sample is told before anything is made
    return loader
