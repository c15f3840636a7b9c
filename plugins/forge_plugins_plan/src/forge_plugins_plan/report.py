"""Everything that a plan says, as data and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf, prod
from pathlib import Path
from typing import Any

import attrs

from forge_core.api import PassComponent
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.gpu import Gpu
from forge_core.contracts.parallel_pass import Traffic
from forge_core.distributed.mesh import DATA_AXES
from forge_core.errors import ConfigError
from forge_core.job import resolve_degrees
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_core.train.build import build_on_meta
from forge_plugins_plan.alternatives import Alternative, alternatives
from forge_plugins_plan.machine import Machine
from forge_plugins_plan.memory import CATEGORIES
from forge_plugins_plan.simulation import SimulatedRank, simulate
from forge_plugins_plan.stages import simulate_stages
from forge_plugins_plan.step_report import PlannedTime, planned_time, time_lines

GIB = 2**30
_FRAGMENTATION = 1.03


@attrs.frozen
class PlannedPass:
    """A pass that would be applied, and what it touched on rank 0."""

    name: str
    phase: str
    modules: int
    """How many of them it touched."""
    touched: Sequence[str]
    """Names with ``*`` for numbers, each with how many it stands for if that is more than one."""


@attrs.frozen
class PlannedStage:
    """Rank 0 of a pipeline stage; the others hold no more."""

    rank: int
    parameter_bytes: int
    peak_bytes: int | None
    """``None`` if no step can be simulated."""
    at_peak: Mapping[str, int]
    """Bytes at the peak, by what they are for."""
    largest: Mapping[str, int]
    """The most bytes at any time, by what they are for."""
    reason: str
    """Why a step cannot be simulated; otherwise empty."""
    traffic: Sequence[Traffic]
    """What it sends in a step, as far as passes tell."""


@attrs.frozen
class PlannedRecomputation:
    """What a way to recompute would make of the stage that needs most."""

    what: str
    """The pass and its keys, or ``nothing``."""
    is_the_jobs: bool
    activation_bytes: int
    """The most that is kept from forward to backward."""
    peak_bytes: int
    step_seconds: float | None = None
    """``None`` without times, or with a pipeline, of which only one part is simulated again."""
    computing_seconds: float | None = None
    """Of ``step_seconds``, what products, attention and all else in forward and backward take."""


@attrs.frozen
class Plan:
    """What the job would be and take."""

    model: str
    parameters: int
    """Their number in the whole model."""
    vocab_size: int
    seq_len: int
    tokens_per_step: int
    """Of all ranks."""
    flops_per_token: Mapping[str, float]
    """Forward and backward, by the convention that counts them."""
    mesh: Mapping[str, int]
    """The degree of each axis."""
    ep: int
    """It borrows the ranks of other axes."""
    ranks_per_node: int
    passes: Sequence[PlannedPass]
    stages: Sequence[PlannedStage]
    recomputation: Sequence[PlannedRecomputation]
    gpu: Gpu | None
    """The one that was named."""
    fits: bool | None
    """``None`` without a GPU, or if no step can be simulated."""
    time: PlannedTime | None = None
    """``None`` without the figures of a machine, or if no step can be simulated."""

    @property
    def heaviest(self) -> PlannedStage:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: (stage.peak_bytes or 0, stage.parameter_bytes))


def make_plan(
    job: Job,
    catalog: Catalog,
    world_size: int,
    vocab_size: int | None,
    gpu: Gpu | None,
    ranks_per_node: int = 8,
    machine: Machine | None = None,
) -> Plan:
    """Simulate the job among ``world_size`` ranks.

    Args:
        vocab_size: the data's, if the job does not say.
        machine: whose times are told.

    Raises:
        ForgeError: what a real run would say before its first step, data apart.
    """
    build = ComponentBuilder(catalog)
    rows = vocabulary_of(job, build, vocab_size)
    degrees = resolve_degrees(job.parallel, world_size)
    simulated = simulate_stages(job, catalog, rows, world_size, gpu, ranks_per_node, timed=machine is not None)
    stages = [_stage(one) for one in simulated]
    plan = Plan(
        model=job.model.qualified_name,
        parameters=simulated[0].built.n_parameters,
        vocab_size=rows,
        seq_len=job.train.seq_len,
        tokens_per_step=(job.train.grad_accumulation or 1)
        * job.train.batch_size
        * prod(degrees[axis] for axis in DATA_AXES)
        * job.train.seq_len,
        flops_per_token=flops_by_convention(job, rows, build),
        mesh=degrees,
        ep=job.parallel.ep,
        ranks_per_node=ranks_per_node,
        passes=[
            _planned(one.use, one.touched, catalog.lookup("parallel_pass", one.use.qualified_name))
            for one in simulated[0].built.applied
        ],
        stages=stages,
        recomputation=[],
        gpu=gpu,
        fits=None,
    )
    peak = plan.heaviest.peak_bytes
    if peak is None:
        return plan
    plan = attrs.evolve(plan, time=_time(job, simulated, plan, machine))
    return attrs.evolve(
        plan,
        recomputation=_recomputation(job, catalog, rows, world_size, plan, build, simulated, machine),
        fits=needed_gib(peak) <= gpu.free_gib if gpu is not None else None,
    )


def _time(job: Job, simulated: Sequence[SimulatedRank], plan: Plan, machine: Machine | None) -> PlannedTime | None:
    if machine is None:
        return None
    return planned_time(
        job,
        simulated,
        machine,
        tokens=plan.tokens_per_step,
        flops_per_token=plan.flops_per_token["standard"],
        ranks=prod(plan.mesh.values()),
        compiled=any(one.phase == "compile" for one in plan.passes),
    )


def needed_gib(peak_bytes: int) -> float:
    """What must be free for a predicted peak: more, as an allocator cannot fill every gap."""
    return peak_bytes / GIB * _FRAGMENTATION


def flops_by_convention(job: Job, vocab_size: int, build: ComponentBuilder) -> dict[str, float]:
    """FLOPs a token, forward and backward, as different people count them.

    ``standard`` is ``Model.flops_per_token``, which ``mfu`` in the metrics uses: 6 a weight that is multiplied, and
    attention over the full square (PaLM, torchtitan). ``with_embedding`` counts 6 for every parameter (litgpt,
    llm-foundry). ``causal`` counts only the half of attention's square that a causal model needs.
    """
    model: Any = build_on_meta(job, vocab_size, build)
    standard = model.flops_per_token(job.train.seq_len)
    attention = standard - model.flops_per_token(0)
    roles = model.parameter_roles()
    is_tied = "head" not in roles.values()  # the head counts the table then
    table = sum(p.numel() for name, p in model.named_parameters() if roles[name] == "embedding")
    return {
        "standard": standard,
        "with_embedding": standard + (0 if is_tied else 6 * table),
        "causal": standard - attention / 2,
    }


def as_text(plan: Plan) -> Iterator[str]:
    """The plan in lines."""
    axes = [f"{axis} {degree}" for axis, degree in {**plan.mesh, "ep": plan.ep}.items() if degree > 1]
    ranks = prod(plan.mesh.values())
    yield f"model  {plan.model}: {plan.parameters:,} parameters, vocabulary {plan.vocab_size:,}"
    yield f"ranks  {ranks}{': ' if axes else ''}{', '.join(axes)}"
    yield f"step   {plan.tokens_per_step:,} tokens in sequences of {plan.seq_len:,}"
    yield ""
    yield from _flops_lines(plan)
    yield ""
    yield "Passes, in the order in which they are applied" if plan.passes else "No passes"
    for one in plan.passes:
        touched = f"{', '.join(one.touched[:_NAMES])}{' …' if len(one.touched) > _NAMES else ''}"
        yield f"  {one.phase:<13} {one.name}: {one.modules} modules: {touched}"
    yield ""
    yield from _memory_lines(plan)
    yield from _fit_lines(plan)
    if plan.time is not None:
        yield ""
        yield from time_lines(plan.time, prod(plan.mesh.values()))
    yield from _traffic_lines(plan)


_NAMES = 4
"""How many names of modules the text has room for."""

_CONVENTIONS = {
    "standard": "weights without the embedding, attention whole (PaLM, torchtitan; the metric mfu)",
    "with_embedding": "weights with the embedding, attention whole (litgpt, llm-foundry)",
    "causal": "weights without the embedding, attention halved as it is causal",
}


def _flops_lines(plan: Plan) -> Iterator[str]:
    bound = f", and the tokens/s at which one {plan.gpu.name} would do them" if plan.gpu else ""
    yield f"GFLOP a token, forward and backward{bound}"
    for convention, words in _CONVENTIONS.items():
        flops = plan.flops_per_token[convention]
        speed = f" {plan.gpu.peak_flops / flops:>14,.0f}" if plan.gpu else ""
        yield f"  {flops / 1e9:>10.5g}{speed}  {words}"


def _memory_lines(plan: Plan) -> Iterator[str]:
    heaviest = plan.heaviest
    unit = "GiB" if (heaviest.peak_bytes or heaviest.parameter_bytes) >= GIB else "MiB"

    def row(what: str, *sizes: int | None) -> str:
        scale = GIB if unit == "GiB" else GIB / 1024
        return f"  {what:<44}" + "".join(f"{'?' if size is None else f'{size / scale:.3f}':>12}" for size in sizes)

    def title(what: str, *columns: str) -> str:
        return (f"{f'{what}, {unit}':<46}" + "".join(f"{column:>12}" for column in columns)).rstrip()

    if len(plan.stages) > 1:
        yield title("Memory of rank 0 of each of pp", "parameters", "peak")
        for number, stage in enumerate(plan.stages):
            yield row(f"pp {number}: rank {stage.rank}", stage.parameter_bytes, stage.peak_bytes)
        yield ""
    if heaviest.peak_bytes is None:
        yield title(f"Memory of rank {heaviest.rank}")
        yield row("parameters", heaviest.parameter_bytes)
        return
    yield title(f"Memory of rank {heaviest.rank}", "at the peak", "at most")
    for category in CATEGORIES:
        yield row(category, heaviest.at_peak[category], heaviest.largest.get(category, 0))
    yield row("all", heaviest.peak_bytes)
    yield ""
    timed = any(one.step_seconds is not None for one in plan.recomputation)
    yield title("Recomputed in backward", "kept", "peak", *["step, s"] * timed)
    for one in plan.recomputation:
        seconds = "" if one.step_seconds is None else f"{one.step_seconds:>12.3f}"
        own = "  (this job)" if one.is_the_jobs else ""
        yield row(one.what, one.activation_bytes, one.peak_bytes) + seconds + own
    yield from _copying_lines(plan.recomputation, unit)
    if any(one.phase == "compile" for one in plan.passes):
        yield "  Blocks are counted as they are written; compiled, they keep less."


def _copying_lines(ways: Sequence[PlannedRecomputation], unit: str) -> Iterator[str]:
    """What is not kept, and costs no computation either, waits in the host's memory."""
    nothing = next((one for one in ways if one.what == "nothing"), None)
    own = next((one for one in ways if one.is_the_jobs), None)
    if nothing is None or own is None:
        return
    spared = nothing.activation_bytes - own.activation_bytes
    if spared > 0 and (own.computing_seconds or inf) <= (nothing.computing_seconds or 0) * (1 + 1e-9):
        fast, slow = (spared / rate for rate in _BUS)
        size = spared / (GIB if unit == "GiB" else GIB / 1024)
        yield (
            f"  {size:.4g} {unit} per microbatch go to the host's memory and back, which no time counts: each way "
            f"{fast:.2g} to {slow:.2g} s"
        )


_BUS = (50e9, 25e9)
"""Bytes per second that a GPU copies from and to the host's memory."""


def _fit_lines(plan: Plan) -> Iterator[str]:
    if plan.gpu is None or plan.heaviest.peak_bytes is None:
        return
    needed = needed_gib(plan.heaviest.peak_bytes)
    yield ""
    yield (
        f"{'Fits' if plan.fits else 'Does not fit'}: with 3 % for fragmentation the peak is {needed:.1f} GiB, and "
        f"{plan.gpu.name} has {plan.gpu.free_gib:.1f} GiB beside what CUDA and NCCL take"
    )


def _traffic_lines(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        if not stage.traffic:
            continue
        yield ""
        sent = [size for one in stage.traffic for size in (one.within_node, one.between_nodes) if size is not None]
        unit, scale = ("GiB", GIB) if max(sent, default=0) >= GIB else ("MiB", GIB / 1024)
        title = f"Sent by rank {stage.rank} in a step, {unit}; {plan.ranks_per_node} ranks a node"
        yield f"{title:<62}{'within':>10}{'between':>10}"
        for one in stage.traffic:
            sizes = ("?" if size is None else f"{size / scale:.3f}" for size in (one.within_node, one.between_nodes))
            yield f"  {one.what:<60}" + "".join(f"{size:>10}" for size in sizes)
            yield f"    {one.reason}"


def _stage(simulated: SimulatedRank) -> PlannedStage:
    memory = simulated.memory
    return PlannedStage(
        simulated.rank,
        simulated.parameter_bytes,
        memory.peak if memory else None,
        memory.at_peak if memory else {},
        memory.largest if memory else {},
        simulated.reason,
        simulated.traffic,
    )


def _planned(use: ComponentRef, touched: Sequence[str], provided: CatalogEntry) -> PlannedPass:
    assert isinstance(provided.component, PassComponent)
    alike = Counter(re.sub(r"\d+", "*", name) or "the model" for name in touched)
    names = [f"{name} ({count})" if count > 1 else name for name, count in alike.items()]
    return PlannedPass(use.qualified_name, provided.component.phase, len(touched), names)


def _recomputation(
    job: Job,
    catalog: Catalog,
    vocab_size: int,
    world_size: int,
    plan: Plan,
    build: ComponentBuilder,
    simulated: Sequence[SimulatedRank],
    machine: Machine | None,
) -> list[PlannedRecomputation]:
    """Of the stage that needs most; ways that cannot be simulated are left out."""
    number = plan.stages.index(plan.heaviest)
    known = simulated[number]
    planned = []
    for one in alternatives(job, catalog, world_size, build):
        if one.is_the_jobs:
            planned.append(_compared(one, plan.heaviest, plan.time if len(plan.stages) == 1 else None))
        else:
            try:
                other = simulate(
                    *(one.job, catalog, vocab_size, world_size, number, plan.gpu, plan.ranks_per_node),
                    like=known.optimizer,
                    seen=known.found,
                    timed=plan.time is not None and len(plan.stages) == 1,
                )
            except ConfigError:  # a model that names no operation to keep
                continue
            stage = _stage(other)
            if stage.peak_bytes is not None:
                time = _time(one.job, [other], plan, machine) if len(plan.stages) == 1 else None
                planned.append(_compared(one, stage, time))
    return planned


def _compared(one: Alternative, stage: PlannedStage, time: PlannedTime | None) -> PlannedRecomputation:
    assert stage.peak_bytes is not None
    return PlannedRecomputation(
        one.what,
        one.is_the_jobs,
        stage.largest.get("activations", 0),
        stage.peak_bytes,
        None if time is None else time.seconds,
        None if time is None else sum(time.parts[part] for part in ("products", "attention", "memory")),
    )


def vocabulary_of(job: Job, build: ComponentBuilder, given: int | None) -> int:
    """The model's vocabulary, as a run would find it, without opening data."""
    configured: int | None = getattr(job.model.config, "vocab_size", None)
    if configured is None:
        configured = given
    if configured is None:
        configured = _vocabulary_of_data(job.data.config, build)
    if configured is None:
        raise ConfigError(
            "the vocabulary is not known without opening the data; say --vocab-size N, or set model.vocab_size"
        )
    return configured


def _vocabulary_of_data(config: Any, build: ComponentBuilder) -> int | None:
    """What the keys say, or those of a mixture's sources."""
    sources = [getattr(one, "source", None) for one in getattr(config, "sources", ())]
    if sources:
        found = [_vocabulary_of_data(getattr(one, "config", None), build) for one in sources]
        return None if None in found else max(one for one in found if one is not None)
    said: int | None = getattr(config, "vocab_size", None)
    tokenizer = getattr(config, "tokenizer", None)
    if said is None and isinstance(tokenizer, ComponentRef) and tokenizer.kind == "tokenizer":
        said = build(tokenizer, base=Path()).vocab_size
    return said
