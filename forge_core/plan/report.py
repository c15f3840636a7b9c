"""Everything that a plan says, as data and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.builder import ComponentBuilder
from forge_core.catalog import Catalog, Provided
from forge_core.component import PassComponent, Use
from forge_core.config.sections import Job
from forge_core.engine.build import build_on_meta
from forge_core.errors import ConfigError
from forge_core.hardware import Gpu
from forge_core.passes import resolve_degrees
from forge_core.plan.memory import CATEGORIES
from forge_core.plan.recompute import MODES
from forge_core.plan.simulation import SimulatedRank, simulate

GIB = 2**30
_FRAGMENTATION = 1.03
_CONTEXT = 1.0
"""GiB that CUDA and NCCL take beside torch's tensors."""


@attrs.frozen
class PlannedPass:
    """A pass that would be applied, and what it touched on the first rank."""

    name: str
    phase: str
    modules: int
    touched: Sequence[str]
    """Names with ``*`` for numbers, each with how many it stands for if that is more than one."""


@attrs.frozen
class PlannedStage:
    """The first rank of a pipeline stage; the others hold no more."""

    rank: int
    parameter_bytes: int
    peak_bytes: int | None
    at_peak: Mapping[str, int]
    largest: Mapping[str, int]
    reason: str
    """Why a step cannot be simulated; otherwise empty."""


@attrs.frozen
class PlannedRecomputation:
    """What a way to recompute would make of the rank that needs most."""

    mode: str
    activation_bytes: int
    peak_bytes: int


@attrs.frozen
class Plan:
    """What the job would be and take."""

    model: str
    parameters: int
    vocab_size: int
    seq_len: int
    flops_per_token: Mapping[str, float]
    mesh: Mapping[str, int]
    passes: Sequence[PlannedPass]
    stages: Sequence[PlannedStage]
    recomputation: Sequence[PlannedRecomputation]
    gpu: Gpu | None
    fits: bool | None
    """``None`` without a GPU, or if no step can be simulated."""

    @property
    def heaviest(self) -> PlannedStage:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: (stage.peak_bytes or 0, stage.parameter_bytes))

    def as_json(self) -> dict[str, Any]:
        """Plain data; sizes are bytes, FLOPs are FLOPs."""
        table: dict[str, Any] = attrs.asdict(self)
        return table


def make_plan(job: Job, catalog: Catalog, world_size: int, vocab_size: int | None, gpu: Gpu | None) -> Plan:
    """Simulate the job among ``world_size`` ranks.

    Args:
        vocab_size: the data's, if the job does not say.

    Raises:
        ForgeError: whatever a real run would say before its first step, data apart.
    """
    build = ComponentBuilder(catalog)
    rows = _vocabulary(job, build, vocab_size)
    simulated = [simulate(job, catalog, rows, world_size, stage) for stage in range(job.parallel.pp)]
    stages = [_stage(one) for one in simulated]
    heaviest = max(range(len(stages)), key=lambda i: stages[i].peak_bytes or 0)
    plan = Plan(
        model=job.model.qualified_name,
        parameters=simulated[0].built.n_parameters,
        vocab_size=rows,
        seq_len=job.train.seq_len,
        flops_per_token=flops_by_convention(job, rows, build),
        mesh=resolve_degrees(job.parallel, world_size),
        passes=[
            _planned(one.use, one.touched, catalog.lookup("parallel_pass", one.use.qualified_name))
            for one in simulated[0].built.applied
        ],
        stages=stages,
        recomputation=_recomputation(job, catalog, rows, world_size, heaviest, stages[heaviest]),
        gpu=gpu,
        fits=None,
    )
    peak = plan.heaviest.peak_bytes
    return plan if gpu is None or peak is None else attrs.evolve(plan, fits=needed_gib(peak) <= gpu.memory_gib)


def needed_gib(peak_bytes: int) -> float:
    """What a GPU must have for a predicted peak: with fragmentation, and what CUDA and NCCL take."""
    return peak_bytes / GIB * _FRAGMENTATION + _CONTEXT


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
    yield f"model {plan.model}: {plan.parameters:,} parameters, vocabulary {plan.vocab_size:,}"
    yield "mesh " + ", ".join(f"{axis} {degree}" for axis, degree in plan.mesh.items())
    yield f"FLOPs a token, forward and backward, of {plan.seq_len:,} tokens a sequence"
    for convention, words in _CONVENTIONS.items():
        flops = plan.flops_per_token[convention]
        bound = f"; {plan.gpu.peak_flops / flops:,.0f} tokens/s a GPU at 100 %" if plan.gpu else ""
        yield f"  {flops / 1e9:>10.3f} GFLOP  {words}{bound}"
    yield "passes, in the order in which they are applied" if plan.passes else "no passes"
    for one in plan.passes:
        yield f"  {one.phase:<13} {one.name}: {one.modules} modules: {', '.join(one.touched)}"
    yield from _memory_lines(plan)
    yield from _fit_lines(plan)


_CONVENTIONS = {
    "standard": "without the embedding, attention whole (PaLM, torchtitan; the metric mfu)",
    "with_embedding": "with the embedding, attention whole (litgpt, llm-foundry)",
    "causal": "without the embedding, attention halved for causality",
}


def _memory_lines(plan: Plan) -> Iterator[str]:
    if len(plan.stages) > 1:
        yield "pipeline stages, GiB a rank"
        for number, stage in enumerate(plan.stages):
            peak = "?" if stage.peak_bytes is None else _gib(stage.peak_bytes)
            yield f"  stage {number} (rank {stage.rank}): parameters {_gib(stage.parameter_bytes)}, peak {peak}"
    heaviest = plan.heaviest
    if heaviest.peak_bytes is None:
        yield f"memory of rank {heaviest.rank}: parameters {_gib(heaviest.parameter_bytes)} GiB"
        return
    yield f"memory of rank {heaviest.rank}, GiB: at the peak of a step, and the most of each at any time"
    for category in CATEGORIES:
        most = heaviest.largest.get(category, 0)
        yield f"  {category:<12} {_gib(heaviest.at_peak[category]):>10} {_gib(most):>10}"
    yield f"  {'peak':<12} {_gib(heaviest.peak_bytes):>10}"
    yield "activations by what is recomputed, GiB: at the peak of forward and backward, and the peak of a step"
    for one in plan.recomputation:
        yield f"  {one.mode:<12} {_gib(one.activation_bytes):>10} {_gib(one.peak_bytes):>10}"
    if any(one.phase == "compile" for one in plan.passes):
        yield "  compiled blocks are counted as they are written: compiled, they keep less"


def _fit_lines(plan: Plan) -> Iterator[str]:
    if plan.gpu is None or plan.heaviest.peak_bytes is None:
        return
    needed = needed_gib(plan.heaviest.peak_bytes)
    verdict = "fits" if plan.fits else "does not fit"
    yield (
        f"{plan.gpu.name}, {plan.gpu.memory_gib} GiB: {verdict}; the peak with 3 % for fragmentation and "
        f"{_CONTEXT:.0f} GiB for CUDA and NCCL is {needed:.1f} GiB"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"


def _stage(simulated: SimulatedRank) -> PlannedStage:
    memory = simulated.memory
    return PlannedStage(
        simulated.rank,
        simulated.parameter_bytes,
        memory.peak if memory else None,
        memory.at_peak if memory else {},
        memory.largest if memory else {},
        simulated.reason,
    )


def _planned(use: Use, touched: Sequence[str], provided: Provided) -> PlannedPass:
    assert isinstance(provided.component, PassComponent)
    alike = Counter(re.sub(r"\d+", "*", name) or "the model" for name in touched)
    names = [f"{name} ({count})" if count > 1 else name for name, count in alike.items()]
    return PlannedPass(use.qualified_name, provided.component.phase, len(touched), names)


def _recomputation(
    job: Job, catalog: Catalog, vocab_size: int, world_size: int, number: int, stage: PlannedStage
) -> list[PlannedRecomputation]:
    if stage.peak_bytes is None:
        return []
    optimizer = stage.largest.get("optimizer", 0)
    after = stage.parameter_bytes + stage.largest.get("gradients", 0) + optimizer  # while the optimizer steps
    planned = []
    for mode in MODES:
        memory = simulate(job, catalog, vocab_size, world_size, number, mode).memory
        if memory is not None:
            planned.append(
                PlannedRecomputation(mode, memory.at_peak["activations"], max(memory.peak + optimizer, after))
            )
    return planned


def _vocabulary(job: Job, build: ComponentBuilder, given: int | None) -> int:
    """The model's vocabulary, as a run would find it, without opening data."""
    configured: int | None = getattr(job.model.config, "vocab_size", None)
    if configured is None:
        configured = given
    if configured is None:
        configured = getattr(job.data.config, "vocab_size", None)
    tokenizer = getattr(job.data.config, "tokenizer", None)
    if configured is None and isinstance(tokenizer, Use) and tokenizer.kind == "tokenizer":
        configured = build(tokenizer, base=Path()).vocab_size
    if configured is None:
        raise ConfigError(
            "the vocabulary is not known without opening the data; say --vocab-size N, or set model.vocab_size"
        )
    return configured
