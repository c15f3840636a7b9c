"""Looks for the layouts of a job that take the shortest step: many by estimates, the promising ones simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, prod

import attrs

from forge_core.config.sections import Job
from forge_core.distributed.mesh import DATA_AXES
from forge_core.errors import ConfigError, ForgeError
from forge_core.registry.catalog import Catalog
from forge_plugins_plan.alternatives import recomputations
from forge_plugins_plan.clock import PARTS, StuckError, busy_time, step_time
from forge_plugins_plan.machine import Machine
from forge_plugins_plan.repeated import Repetition
from forge_plugins_plan.report import Plan, needed_gib
from forge_plugins_plan.simulation import OptimizerStep, SimulatedRank, simulate
from forge_plugins_plan.step_report import mfu_of
from forge_plugins_plan.work import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Work

BEST = 5
SIMULATED = 12
"""At most."""
_OF_KIND = 5
"""Of one choice of ``pp``, ``cp``, ``tp`` and ``ep``, so many that fit are simulated at most: others differ in less."""
_ESTIMATES_ARE_OFF = 0.8
"""So much of an estimate of time has to be too much before a layout is left out for it; and of one of memory, until a
layout that recomputes alike has been simulated, and shows what there is beside what is estimated."""
_TOKENS = 1024
"""Of a sequence, that a rank along ``cp`` has at least."""


@attrs.frozen
class Candidate:
    """A layout, by what it changes in the job."""

    degrees: Mapping[str, int]
    """All axes of the mesh, and ``ep``."""
    batch_size: int
    """Sequences of a microbatch."""
    microbatches: int
    recomputed: str
    overrides: tuple[str, ...]
    """Those of the command line that make it."""

    @property
    def kind(self) -> tuple[int, ...]:
        """How the model and its sequences are cut."""
        return tuple(self.degrees[axis] for axis in ("pp", "cp", "tp", "ep"))


@attrs.frozen
class Layout:
    """A layout that has been simulated."""

    candidate: Candidate
    seconds: float
    parts: Mapping[str, float]
    """As ``PlannedTime.parts``."""
    tokens_per_second: float
    mfu: float
    peak_bytes: int
    fits: bool | None


@attrs.frozen
class Search:
    """What was found, and what became of the others."""

    best: Sequence[Layout]
    """The ones that fit, fastest first."""
    too_large: Sequence[Layout]
    """Simulated, and they do not fit; fastest first."""
    considered: int
    batch_not_shared: int
    """The step's sequences cannot be shared out evenly to the ranks and microbatches."""
    refused: int
    """By the job's own rules, of those whose turn came."""
    over_memory: int
    """By an estimate."""
    slower: int
    """By an estimate."""
    simulated: int
    not_simulated: int
    """A step of them cannot be simulated."""


def search(
    job: Job,
    load: Callable[[Sequence[str]], Job],
    catalog: Catalog,
    plan: Plan,
    machine: Machine,
    tell: Callable[[str], None],
    *,
    whole: bool = False,
) -> Search:
    """The best layouts of the plan's ranks, for as many sequences a step as the job has.

    Args:
        load: the job with overrides on top of the user's; raises ``ConfigError`` where its rules refuse it.
        plan: of the job as it is, with times.
        tell: called with a sentence for each layout that is looked at: a simulation takes seconds.
        whole: overrides name every degree, as the plan is of another layout than the user's job has.
    """
    estimate = _Estimate(plan, machine, job)
    ways = _ways(job, catalog, plan)
    candidates, batch_not_shared = [], 0
    for degrees in _degrees(job, plan, _experts(load)):
        found = [one for way in ways for one in _microbatches(job, plan, degrees, *way, whole=whole)]
        candidates += found
        batch_not_shared += not found
    queue = sorted(candidates, key=estimate.seconds)
    free = plan.gpu.free_gib if plan.gpu is not None else inf
    beside = dict.fromkeys((what for what, _ in ways), _ESTIMATES_ARE_OFF)
    of_kind: Counter[tuple[int, ...]] = Counter()
    fitting: list[Layout] = []
    large: list[Layout] = []
    left: Counter[str] = Counter()
    known: dict[object, tuple[OptimizerStep, Sequence[Repetition]]] = {}
    for number, one in enumerate(queue):
        done = len(fitting) + len(large)
        tell(f"{number:,} of {len(queue):,} layouts looked at, {done} of at most {SIMULATED} simulated")
        fitting.sort(key=lambda layout: layout.seconds)
        late = len(fitting) >= BEST and estimate.seconds(one) * _ESTIMATES_ARE_OFF > fitting[BEST - 1].seconds
        if needed_gib(estimate.memory(one)) * beside[one.recomputed] > free:
            left["too large"] += 1
        elif late or done == SIMULATED or of_kind[one.kind] == _OF_KIND:
            left["slower"] += 1
        elif (other := _loaded(load, one)) is None:
            left["refused"] += 1
        elif (layout := _simulated(other, catalog, plan, machine, one, known)) is None:
            left["not simulated"] += 1
        else:
            (large if layout.fits is False else fitting).append(layout)
            of_kind[one.kind] += layout.fits is not False
            beside[one.recomputed] = layout.peak_bytes / estimate.memory(one)
    fitting.sort(key=lambda layout: layout.seconds)
    return Search(
        best=fitting[:BEST],
        too_large=sorted(large, key=lambda layout: layout.seconds),
        considered=len(candidates) + batch_not_shared,
        batch_not_shared=batch_not_shared,
        refused=left["refused"],
        over_memory=left["too large"],
        slower=left["slower"],
        simulated=len(fitting) + len(large),
        not_simulated=left["not simulated"],
    )


def _loaded(load: Callable[[Sequence[str]], Job], one: Candidate) -> Job | None:
    """The job in this layout, nothing if it is refused."""
    try:
        return load(one.overrides)
    except ConfigError:
        return None


def _ways(job: Job, catalog: Catalog, plan: Plan) -> list[tuple[str, Sequence[str]]]:
    """Ways to recompute of which the plan has figures, with the overrides that make them."""
    planned = {way.what: way.is_the_jobs for way in plan.recomputation}
    offered: dict[str, Sequence[str]] = {what: given for what, given in recomputations(job, catalog) if what in planned}
    return [*{**offered, **{what: () for what, is_own in planned.items() if is_own}}.items()]


def _degrees(job: Job, plan: Plan, experts: int) -> Iterator[dict[str, int]]:
    """Degrees whose product is the number of ranks: powers of two, tensor parallelism within a node.

    Args:
        experts: the most that ``ep`` can be.
    """
    world = prod(plan.mesh.values())
    for pp in _powers(world):
        for tp in _powers(min(plan.ranks_per_node, world // pp)):
            for cp in _powers(min(world // pp // tp, max(1, job.train.seq_len // _TOKENS))):
                for ep in _powers(min(experts, world // pp)):
                    rest = world // pp // tp // cp
                    if pp * tp * cp * rest != world:
                        continue
                    for replicate in (one for one in _powers(rest) if rest % one == 0):
                        yield {
                            "pp": pp,
                            "dp_replicate": replicate,
                            "dp_shard": rest // replicate,
                            "cp": cp,
                            "tp": tp,
                            "ep": ep,
                        }


def _experts(load: Callable[[Sequence[str]], Job]) -> int:
    """The largest ``parallel.ep``, a power of two up to 64, that the job's rules allow; 1 of a dense model."""
    most = 1
    while most < _MOST_EXPERTS:
        try:
            load([f"parallel.ep={2 * most}"])
        except ConfigError:
            break
        most *= 2
    return most


_MOST_EXPERTS = 64


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _microbatches(
    job: Job, plan: Plan, degrees: Mapping[str, int], what: str, of_recomputation: Sequence[str], *, whole: bool
) -> Iterator[Candidate]:
    """Every size of a microbatch that divides the sequences of a rank."""
    sequences = plan.tokens_per_step // plan.seq_len
    of_rank, rest = divmod(sequences, prod(degrees[axis] for axis in DATA_AXES))
    if rest or of_rank == 0:
        return
    given = [
        f"parallel.{axis}={degree}"
        for axis, degree in degrees.items()
        if whole or degree > 1 or plan.mesh.get(axis, plan.ep) > 1
    ]
    for size in range(1, of_rank + 1):
        if of_rank % size == 0 and of_rank // size >= degrees["pp"]:
            count = of_rank // size
            batch = [f"train.batch_size={size}"]
            if job.train.global_batch_size is None:
                batch.append(f"train.grad_accumulation={count}")
            yield Candidate(degrees, size, count, what, (*given, *batch, *of_recomputation))


@attrs.frozen
class _Estimate:
    """Of memory and time, by proportion to the plan of the job as it is: which layouts are worth a simulation."""

    plan: Plan
    machine: Machine
    job: Job

    def memory(self, one: Candidate) -> int:
        """Bytes of a rank: its states, and what is kept from forward to backward."""
        stage, there, degrees = self.plan.heaviest, self.plan.mesh, one.degrees
        states = stage.parameter_bytes + stage.largest.get("optimizer", 0) + stage.largest.get("gradients", 0)
        return int(states * _shards(there) / _shards(degrees) + self._kept(one, one.recomputed))

    def seconds(self, one: Candidate) -> float:
        """Of a step."""
        assert self.plan.time is not None
        parts, degrees = self.plan.time.parts, one.degrees
        compute = parts["products"] + parts["attention"] + parts["memory"] + self._more(one.recomputed)
        bubble = compute * (degrees["pp"] - 1) / one.microbatches
        beside = max(0.0, self._of_fsdp(one) - 0.9 * compute)
        return compute + bubble + beside + self._of_sequences(one) + parts["optimizer"]

    def _kept(self, one: Candidate, what: str) -> float:
        there, degrees = self.plan.mesh, one.degrees
        kept = next(way.activation_bytes for way in self.plan.recomputation if way.what == what)
        count = self.job.train.grad_accumulation or 1
        held = min(one.microbatches, degrees["pp"]) / degrees["pp"] / (min(count, there["pp"]) / there["pp"])
        tokens = (
            one.batch_size * there["cp"] * there["tp"] / (self.job.train.batch_size * degrees["cp"] * degrees["tp"])
        )
        return kept * tokens * held

    def _more(self, what: str) -> float:
        """Seconds that this way to recompute takes beyond the job's own."""
        seconds = {way.what: way.step_seconds for way in self.plan.recomputation}
        own = next(way.step_seconds for way in self.plan.recomputation if way.is_the_jobs)
        there = seconds[what]
        return 0.0 if own is None or there is None else there - own

    def _of_fsdp(self, one: Candidate) -> float:
        """Its collectives: parameters gathered in bf16 forward and backward, gradients reduced in fp32."""
        degrees, count = one.degrees, one.microbatches
        size = self.plan.parameters // (degrees["pp"] * degrees["tp"] * degrees["ep"])
        shards, inner = degrees["dp_shard"] * degrees["cp"], degrees["tp"]
        times = 1 if degrees["pp"] > 1 else count
        gathered = self._collective(ALL_GATHER, 2 * size, shards, inner)
        reduced = self._collective(REDUCE_SCATTER, 4 * size, shards, inner)
        summed = self._collective(ALL_REDUCE, 4 * size // shards, degrees["dp_replicate"], inner * shards)
        return (2 * gathered + reduced) * times + summed

    def _of_sequences(self, one: Candidate) -> float:
        """Collectives of tensor and context parallelism. Block inputs are about what is kept if all is recomputed."""
        least = min(self.plan.recomputation, key=lambda way: way.activation_bytes).what
        degrees = one.degrees
        whole = int(self._kept(attrs.evolve(one, microbatches=1), least) * degrees["pp"])
        of_tp = 8 * self._collective(ALL_GATHER, whole * degrees["tp"] // degrees["pp"], degrees["tp"], 1)
        of_cp = 3 * self._collective(ALL_GATHER, whole * degrees["cp"] // degrees["pp"], degrees["cp"], degrees["tp"])
        return one.microbatches * (of_tp + of_cp)

    def _collective(self, kind: str, size: int, ranks: int, inner: int) -> float:
        """Of ranks that are ``inner`` apart."""
        if ranks == 1:
            return 0.0
        of_node = min(ranks, max(1, self.plan.ranks_per_node // inner))
        return self.machine.seconds(Work(kind, size=max(1, size), ranks=ranks, ranks_of_node=of_node))


def _shards(degrees: Mapping[str, int]) -> int:
    return degrees["pp"] * degrees["tp"] * degrees["dp_shard"] * degrees["cp"]


def _simulated(
    job: Job,
    catalog: Catalog,
    plan: Plan,
    machine: Machine,
    one: Candidate,
    known: dict[object, tuple[OptimizerStep, Sequence[Repetition]]],
) -> Layout | None:
    """Nothing if a step of it cannot be simulated.

    Of a pipeline, the first stage and the last are, with twice as many microbatches as there are stages at most. Each
    further microbatch takes the time of the slower one. Stages between the two are taken to be as the faster one,
    which has the smaller of embedding and head: with them, the bubble is ``pp - 1`` of its microbatches over the
    stages of a rank.

    Args:
        known: what layouts share that cut the model alike; it grows with each that is simulated.
    """
    pp, world = one.degrees["pp"], prod(plan.mesh.values())
    count = min(one.microbatches, 2 * pp) if pp > 1 else one.microbatches
    short = attrs.evolve(job, train=attrs.evolve(job.train, grad_accumulation=count, global_batch_size=None))
    try:
        ranks = []
        for stage in sorted({0, pp - 1}):
            key = *one.degrees.values(), stage, count if pp > 1 else min(count, 2)
            optimizer, found = known.get(key, (None, ()))
            told = short, catalog, plan.vocab_size, world, stage, plan.gpu, plan.ranks_per_node
            rank = simulate(*told, like=optimizer, seen=found, timed=True)
            if rank.optimizer is not None:
                known.setdefault(key, (rank.optimizer, [attrs.evolve(each, module=None) for each in rank.found]))
            ranks.append(rank)
    except ForgeError:
        return None
    if any(rank.memory is None or rank.optimizer is None for rank in ranks):
        return None
    compiled = any(phase == "compile" for phase in (each.phase for each in plan.passes))
    try:
        parts = _parts(ranks, machine, count, one, compiled=compiled)
    except StuckError:
        return None
    seconds = sum(parts.values())
    speed = plan.tokens_per_step / seconds
    peak = max(rank.memory.peak for rank in ranks if rank.memory is not None)
    return Layout(
        one,
        seconds,
        parts,
        speed,
        mfu_of(job, machine, speed * plan.flops_per_token["standard"] / world),
        peak,
        None if plan.gpu is None else needed_gib(peak) <= plan.gpu.free_gib,
    )


def _parts(
    ranks: Sequence[SimulatedRank], machine: Machine, count: int, one: Candidate, *, compiled: bool
) -> dict[str, float]:
    stages = [(rank.run, rank.optimizer.changes) for rank in ranks if rank.optimizer is not None]
    pp, further = one.degrees["pp"], one.microbatches - count
    if pp == 1:
        return dict(step_time(stages, machine, count, compiled=compiled).parts)
    busy = [busy_time(run, changes, machine, compiled=compiled) for run, changes in stages]
    run, update = max(busy, key=lambda each: each[0].seconds)
    if pp == len(stages):
        played = step_time(stages, machine, compiled=compiled)
        return {part: played.parts[part] + run.parts[part] / count * further for part in PARTS}
    parts = {part: run.parts[part] * one.microbatches / count + update.parts[part] for part in PARTS}
    fastest = min(each.seconds for each, _ in busy)
    parts["bubble"] += fastest / count * (pp - 1) / len(ranks[0].built.parts)
    return parts
