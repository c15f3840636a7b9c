"""One rank of many, in one process: the real build and a real step on tensors that have shapes and no memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import attrs
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.batch import KNOWN, Entry
from forge_core.contracts.gpu import Gpu
from forge_core.contracts.parallel_pass import PassContext, Traffic
from forge_core.distributed.mesh import Mesh, build_mesh
from forge_core.errors import ConfigError, ForgeError
from forge_core.job import sort_passes
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.ops.local_tensor import local_tensor
from forge_core.ops.partial_gradients import PartialGradients
from forge_core.registry.catalog import Catalog
from forge_core.train.build import BuiltModel, allocate, build_model, build_optimizer
from forge_core.train.gradients import Gradients, clip_gradients
from forge_plugins_plan.alike import alike, block_names, stages_alike
from forge_plugins_plan.fused_norm import fused_norms
from forge_plugins_plan.memory import CATEGORIES, MemoryLedger, bytes_of
from forge_plugins_plan.microbatches import Traces, replayed
from forge_plugins_plan.repeated import (
    NotRepeatedError,
    Repetition,
    TooFewTurnsError,
    lengthened,
    repetitions,
    shortened,
)
from forge_plugins_plan.timeline import Tally, Timeline
from forge_plugins_plan.work import Microbatch, Recorder
from forge_plugins_plan.world import rank_of

_ALWAYS = ("tokens", "targets")
_OF_BATCHES = "parameters"
"""The category that they are counted in."""
_CPU = torch.device("cpu")  # FSDP's streams of a GPU cannot be had without one; sizes are the same


@attrs.frozen
class RankMemory:
    """What one rank holds during a step, in bytes."""

    peak: int
    at_peak: Mapping[str, int]
    """Adds up to ``peak``; the categories are those of ``forge_plugins_plan.memory``."""
    largest: Mapping[str, int]
    """The most that each category has, each at its own time."""


@attrs.frozen
class OptimizerStep:
    """What the optimizer has and does, which is the same for every way to recompute."""

    parameters: Sequence[object]
    """What is updated, in words."""
    start: Tally
    """Before forward: parameters, and the optimizer's state."""
    changes: Timeline
    """After backward."""
    largest: Mapping[str, int]
    """Bytes of its state, and of the gradients that it reads."""
    batches: int
    """Bytes of the microbatches, which are there at the start."""

    def beside(self, batches: int) -> OptimizerStep:
        """The step of a job whose microbatches take so many bytes."""
        start = copy.deepcopy(self.start)
        start.current[_OF_BATCHES] += batches - self.batches
        start.restart()
        return attrs.evolve(self, start=start, batches=batches)


@attrs.frozen
class SimulatedRank:
    """What became of the job on one rank."""

    rank: int
    stage: int
    built: BuiltModel
    parameter_bytes: int
    memory: RankMemory | None
    """``None`` if the step cannot be simulated."""
    reason: str
    """Why it cannot; otherwise empty."""
    traffic: Sequence[Traffic]
    optimizer: OptimizerStep | None
    """``None`` like ``memory``."""
    run: Timeline = ()
    """Forward and backward of the step."""
    traces: Traces | None = None
    """Of a pipeline, if all follows from some of the microbatches."""
    found: Sequence[Repetition] = ()
    """Blocks of which some have been left out."""


def simulate(
    job: Job,
    catalog: Catalog,
    vocab_size: int,
    world_size: int,
    stage: int,
    gpu: Gpu | None = None,
    ranks_per_node: int = 8,
    *,
    shorten: bool = True,
    like: OptimizerStep | None = None,
    seen: Sequence[Repetition] = (),
    timed: bool = False,
) -> SimulatedRank:
    """Build ``job`` for rank 0 of a pipeline stage among ``world_size`` ranks, and run a step of it.

    The optimizer has made its state before that step, as in every step but the first. Compiled blocks run as they are
    written.

    Args:
        gpu: what the job is to run on, for passes that decide by it, and kernels that a CPU does not have.
        ranks_per_node: what a launcher would say.
        shorten: run forward and backward of some of the blocks that are alike, where the rest follows from these.
        like: the optimizer's step of a job that differs in what is recomputed, or in its sequences; it is not run again
            then.
        seen: blocks that have been seen to do the same in such a job, and of which fewer are run.
        timed: record what operations do, too, of which a ``Clock`` makes times.

    Raises:
        ForgeError: what the build of a real run would say.
    """
    one = Simulation(job, catalog, vocab_size, world_size, stage, gpu, ranks_per_node, timed, like, seen)
    for more in (0, 1) if shorten else ():
        try:
            return one.run(more)
        except TooFewTurnsError:
            continue
        except NotRepeatedError:
            break
    return one.run(None)


@contextmanager
def without_collections() -> Iterator[None]:
    """Simulations make many objects and hardly any garbage. To search for it takes a tenth of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Planned(FakeTensorMode):  # type: ignore[no-untyped-call]  # of a metaclass of torch
    """Tensors without memory on a CPU, in the place of a GPU's.

    Attributes:
        gpu: by which a module chooses its kernel: the ``fake_mode`` of its tensors has it. ``None``: it is a CPU's.
    """

    def __init__(self, gpu: Gpu | None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.gpu = gpu


@attrs.frozen
class Simulation:
    """The simulation of one rank; see ``simulate``."""

    job: Job
    catalog: Catalog
    vocab_size: int
    world_size: int
    stage: int
    gpu: Gpu | None
    ranks_per_node: int
    timed: bool
    like: OptimizerStep | None = None
    seen: Sequence[Repetition] = ()

    def run(self, more: int | None) -> SimulatedRank:
        """
        Args:
            more: blocks that are alike are left out, but for so many turns beyond the usual number; ``None``: all run.

        Raises:
            ForgeError: as ``simulate``.
            NotRepeatedError: the whole model has to be run.
        """
        ledger = MemoryLedger()
        fake = Planned(self.gpu)
        found: list[Repetition] = []

        def allocate_only(part: nn.Module, device: torch.device, _: int) -> None:
            of_part = [] if more is None else repetitions(part, more=more, seen=() if more else self.seen)
            found.extend(of_part)
            # no optimizer will ask for the others
            with fake, ledger, nullcontext() if self.like is None else shortened(of_part, []):
                allocate(part, device)

        with self._build(allocate_only) as rank:
            ledger.vocabulary = _vocabulary(rank.built, self.vocab_size)
            told = self.rank, self.stage, rank.built, rank.parameter_bytes
            traffic = [] if self.like is not None else rank.traffic()
            if any(getattr(applier, "parameters_on_host", False) for applier in rank.appliers):
                reason = "parameters and optimizer are in the host's memory, and of a step there is no telling what is"
                return SimulatedRank(*told, None, reason, traffic, None)
            try:
                fewer = nullcontext() if more is None else replayed(ledger, self.job.train.grad_accumulation or 1)
                with fake, ledger, nullcontext() if self.gpu is None else fused_norms(), fewer as replay:
                    memory, optimizer, run = self._step(rank, ledger, found)
                traces = replay.finished(fake) if replay is not None else None
                return SimulatedRank(*told, memory, "", traffic, optimizer, run, traces, found)
            except NotRepeatedError:
                raise
            except Exception as error:  # of torch or of a plugin; what is known without a step still is
                if found:
                    raise NotRepeatedError from error
                kind = "" if isinstance(error, ForgeError) else f"{type(error).__name__}: "
                reason = f"{kind}{error if not kind else (str(error).splitlines() or ['no message'])[0]}"
                return SimulatedRank(*told, None, reason, traffic, None)

    def twin(self) -> Twin:
        """The rank as it is built, before its step.

        Raises:
            ForgeError: as ``simulate``.
        """
        with self._build(lambda *_: None) as rank:
            return Twin(rank.built, build_optimizer(self.job, rank.built, rank.build))

    def follow(self, patterns: Sequence[tuple[Twin, SimulatedRank]]) -> SimulatedRank | None:
        """The rank, by what another one has done that does the same; nothing if there is none.

        Args:
            patterns: ranks that have been simulated, each with what it was before its step.

        Raises:
            ForgeError: as ``simulate``.
        """
        if not patterns:
            return None
        with self._build(lambda *_: None) as rank:
            own = Twin(rank.built, build_optimizer(self.job, rank.built, rank.build))
            known = next((known for twin, known in patterns if own.does_as(twin)), None)
            if known is None or known.traces is None or known.optimizer is None:
                return None
            ledger = MemoryLedger()
            try:
                with known.traces.fake, ledger, replayed(ledger, self.job.train.grad_accumulation or 1, known.traces):
                    self._run(rank, ledger)
                gradients = known.optimizer.largest["gradients"]
                found = [attrs.evolve(one, passes=[]) for one in known.found]
                run = lengthened(ledger.log, found, gradients) if found else ledger.log
            except NotRepeatedError:
                return None
            optimizer = attrs.evolve(known.optimizer, parameters=_updated(rank.built))
            told = self.rank, self.stage, rank.built, rank.parameter_bytes
            memory = _memory(optimizer, run)
            return SimulatedRank(*told, memory, "", rank.traffic(), optimizer, run, found=known.found)

    @property
    def rank(self) -> int:
        return self.stage * (self.world_size // self.job.parallel.pp)

    @contextmanager
    def _build(self, fill: Callable[[nn.Module, torch.device, int], None]) -> Iterator[_BuiltRank]:
        """The rank among the others, while the context lasts."""
        with rank_of(self.world_size, self.rank, self.ranks_per_node):
            mesh = build_mesh(self.job, _CPU)
            build = ComponentBuilder(self.catalog)
            passes = sort_passes(self.job, self.catalog, self.world_size)
            context = PassContext(mesh, self.job, _CPU, self.gpu, _entries(self.job))
            built = build_model(context, self.vocab_size, passes, build, fill=fill)
            size = bytes_of(tensor for part in built.parts for tensor in (*part.parameters(), *part.buffers()))
            yield _BuiltRank(mesh, context, build, built, [build(use) for use in passes], size)

    def _run(self, rank: _BuiltRank, ledger: MemoryLedger) -> int:
        """Run forward and backward, and return the bytes of the microbatches."""
        microbatches = _microbatches(self.job)
        ledger.restart()
        ledger.recorder = Recorder(self.ranks_per_node) if self.timed else None
        scale = torch.ones(())
        LEDGER.start_step(scale)
        with ledger.during("activations"):
            rank.built.run(microbatches, scale)
        return bytes_of(tensor for one in microbatches for tensor in one.values())

    def _step(
        self, rank: _BuiltRank, ledger: MemoryLedger, found: Sequence[Repetition]
    ) -> tuple[RankMemory, OptimizerStep, Timeline]:
        built = rank.built
        updated = _updated(built)
        like = self.like if self.like is not None and self.like.parameters == updated else None
        if found and like is not self.like:
            raise NotRepeatedError("other parameters are updated, of blocks that have not been allocated")
        optimizer = None if like is not None else build_optimizer(self.job, built, rank.build)
        if optimizer is not None:
            with ledger.during("optimizer"):
                _make_state(optimizer)
        marking = _marking(built.parts[0], ledger.log) if self.job.parallel.pp == 1 else nullcontext()
        with _summing_all(found, ledger), shortened(found, ledger.log), marking:
            batches = self._run(rank, ledger)
        n_of_run = len(ledger.log)
        if optimizer is None:
            ledger.resolve({"gradients": _gradients(built)})
        else:
            _stand_in(found, ledger)
            gradients = _gradients(built)
            with ledger.during("optimizer", makes="temporary"):  # its state is there
                clip_gradients(optimizer, Gradients(built.parameters, rank.mesh, _CPU), self.job.train.clip_norm)
                optimizer.step()
            state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
            known = {"gradients": gradients, "optimizer": state}
            ledger.resolve(known)
            largest = {category: bytes_of(tensors) for category, tensors in known.items()}
            like = OptimizerStep(updated, ledger.start(known), ledger.log[n_of_run:], largest, batches)
        assert like is not None
        like = like.beside(batches)
        log = ledger.log[:n_of_run]
        run = lengthened(log, found, like.largest["gradients"], ledger.freed) if found else log
        return _memory(like, run), like, run


@attrs.frozen
class _BuiltRank:
    mesh: Mesh
    context: PassContext
    build: ComponentBuilder
    built: BuiltModel
    appliers: Sequence[Any]
    """The passes."""
    parameter_bytes: int

    def traffic(self) -> list[Traffic]:
        """All that passes say that the rank sends."""
        return [
            one
            for applier in self.appliers
            if hasattr(applier, "traffic")
            for part in self.built.parts
            for one in applier.traffic(part, self.context)
        ]


@attrs.frozen
class Twin:
    """A rank as it is built, before its step, without memory."""

    built: BuiltModel
    optimizer: torch.optim.Optimizer

    def does_as(self, other: Twin) -> bool:
        """Return whether its only stage is like that of ``other``, and updated alike."""
        parts = *self.built.parts, *other.built.parts
        if len(self.built.parts) != 1 or len(parts) != 2 or not stages_alike(*parts):
            return False
        names = block_names(parts[0]) or (), block_names(parts[1]) or ()
        return alike(self.optimizer, other.optimizer, names, worlds=2)


def _memory(optimizer: OptimizerStep, run: Timeline) -> RankMemory:
    tally = copy.deepcopy(optimizer.start)
    tally.play(run)
    tally.play(optimizer.changes)
    at_peak = {category: tally.at_peak[category] for category in CATEGORIES}
    # an optimizer may keep more than its state: adamw_8bit has tables
    largest = {name: max(size, at_peak[name]) for name, size in {**tally.largest, **optimizer.largest}.items()}
    return RankMemory(tally.peak, at_peak, largest)


def _updated(built: BuiltModel) -> list[object]:
    """All that the optimizer updates, in words."""
    return [_in_words(name, parameter) for name, parameter in built.parameters.items()]


@contextmanager
def _marking(part: nn.Module, log: list[Any]) -> Iterator[None]:
    """Mark where microbatches begin that pass the whole model one after the other."""
    numbers = count()
    handle = part.register_forward_pre_hook(lambda *_: log.append(Microbatch(next(numbers))), prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _gradients(built: BuiltModel) -> list[torch.Tensor]:
    return [parameter.grad for parameter in built.parameters.values() if parameter.grad is not None]


@contextmanager
def _summing_all(found: Sequence[Repetition], ledger: MemoryLedger) -> Iterator[None]:
    """Where ranks sum gradients that they have parts of, those of blocks that have been left out are among them."""
    pairs = (pair for one in found for pair in one.stand_ins())
    others = {id(own): other for pair in pairs for own, other in zip(*(one.parameters() for one in pair), strict=True)}
    before = PartialGradients.sum

    def with_gradient(parameter: nn.Parameter) -> Any:
        other = others.get(id(parameter))
        if other is None or other.grad is None:
            return parameter
        with ledger.paused():
            gradient = torch.empty_like(other.grad)
        ledger.adopt(gradient, ledger.category(other.grad), 0)  # to make and free it is not noted
        return SimpleNamespace(grad=gradient)

    def sum_all(partial: PartialGradients) -> None:
        by_axis = {axis: [*map(with_gradient, parameters)] for axis, parameters in partial.by_axis.items()}
        before(attrs.evolve(partial, by_axis=by_axis))

    PartialGradients.sum = sum_all  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PartialGradients.sum = before  # type: ignore[method-assign]


def _stand_in(found: Sequence[Repetition], ledger: MemoryLedger) -> None:
    """Give the parameters of blocks that have been left out the gradients that they would have."""
    for block, other_block in (pair for one in found for pair in one.stand_ins()):
        for parameter, other in zip(block.parameters(), other_block.parameters(), strict=True):
            if other.grad is not None:
                with ledger.paused():
                    parameter.grad = torch.empty_like(other.grad)
                ledger.adopt(parameter.grad, ledger.category(other.grad))


def _in_words(name: str, parameter: torch.Tensor) -> object:
    local = local_tensor(parameter)
    return name, parameter.shape, local.shape, parameter.dtype, parameter.requires_grad


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """By a step, which is when optimizers make it. Parameters of one form share a gradient, as each that is made takes
    time."""
    made: dict[object, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            form = parameter.shape, parameter.dtype, getattr(parameter, "_spec", None)  # of a DTensor
            if form not in made:
                made[form] = torch.zeros_like(parameter)
            parameter.grad = made[form]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _entries(job: Job) -> dict[str, Entry]:
    """What batches have, as far as the data say without being opened; nothing if they say nothing."""
    described = job.data.config.entries()
    return {**{name: KNOWN[name] for name in _ALWAYS}, **described} if described else {}


def _microbatches(job: Job) -> list[dict[str, torch.Tensor]]:
    """Of one step. Without a pipeline, a third microbatch finds what the second found.

    Raises:
        ConfigError: the size of an entry is not known.
    """
    n = job.train.grad_accumulation or 1
    entries = _entries(job) or {name: KNOWN[name] for name in _ALWAYS}
    return [
        {name: _zeros(name, entry, job) for name, entry in entries.items() if entry.wanted_by == "model"}
        for _ in range(n if job.parallel.pp > 1 else min(n, 2))
    ]


def _zeros(name: str, entry: Entry, job: Job) -> torch.Tensor:
    shape = entry.shape(job.train.batch_size, job.train.seq_len)
    if None in shape:
        raise ConfigError(
            f"data: how large the dimension {entry.dims[shape.index(None)]!r} of the entry {name!r} is cannot be known "
            f"without the data; {type(job.data.config).__name__}.entries() may say how large at most"
        )
    return torch.zeros(cast("tuple[int, ...]", shape), dtype=getattr(torch, entry.dtype))


def _vocabulary(built: BuiltModel, vocab_size: int) -> frozenset[int]:
    """The logits' last dimension: the whole vocabulary, or this rank's part of it."""
    heads: list[Any] = [part.head for part in built.parts if getattr(part, "head", None) is not None]
    return frozenset({vocab_size, *(_multiplied_rows(head.weight) for head in heads)})


def _multiplied_rows(weight: torch.Tensor) -> int:
    """Rows of a head that this rank multiplies with: FSDP cuts the table too, but gathers it before."""
    if not isinstance(weight, DTensor) or "tp" not in (names := weight.device_mesh.mesh_dim_names or ()):
        return weight.shape[0]
    tp = names.index("tp")
    cut = weight.placements[tp].is_shard(0)
    return -(-weight.shape[0] // weight.device_mesh.size(tp)) if cut else weight.shape[0]
