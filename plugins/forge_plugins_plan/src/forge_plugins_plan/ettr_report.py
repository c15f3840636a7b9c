"""What ``forge plan --ettr`` says: the effective training time ratio of a planned job, and what would help most."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from forge_core.config.sections import Job
from forge_plugins_plan.ettr import Ettr, simulate
from forge_plugins_plan.figures import Figures, sources
from forge_plugins_plan.lives import LOSSES
from forge_plugins_plan.long_job import Costs, LongJob, best_interval, costs_of, seconds_between_failures
from forge_plugins_plan.report import Plan

DAYS = 90.0
LIVES = 20
SPARES = 4
"""As many as ByteRobust keeps for 1,024 nodes (arXiv 2509.16293, Table 5)."""
SHORT_TIMEOUT = 60.0
"""Seconds that are advised for ``run.step_timeout``, unless a tenth of it is less than a step."""


@attrs.frozen
class Help:
    """Something that a person could change."""

    what: str
    ratio: float
    """The effective training time ratio with it."""


@attrs.frozen(kw_only=True)
class EttrReport:
    """Of a job with figures."""

    job: LongJob
    figures: Figures
    costs: Costs
    found: Ettr
    best_interval: float
    """Seconds of training."""
    helps: tuple[Help, ...]
    """What raises the ratio, most first."""


def report_of(job: Job, plan: Plan, figures: Figures, step_seconds: float) -> EttrReport:
    """Simulate the planned job. Its ranks are those of each replica."""
    replicas = int(figures.replicas)
    checkpoint = job.checkpoint
    in_memory = steps_in_memory(job)
    intervals = [checkpoint.interval * step_seconds] if checkpoint.interval else []
    intervals += [max(step_seconds, checkpoint.minutes * 60)] if checkpoint.minutes else []
    long_job = LongJob(
        gpus=math.prod(plan.mesh.values()) * replicas,
        checkpoint_bytes=checkpoint_bytes(job, plan),
        copies=float(plan.mesh["dp_replicate"] * replicas),
        step_seconds=step_seconds,
        interval=min(intervals, default=math.inf),
        background=checkpoint.background,
        step_timeout=job.run.step_timeout,
        has_mirror=checkpoint.mirror is not None and not in_memory,
        memory_interval=in_memory * step_seconds or math.inf,
    )
    found = simulate(long_job, figures, days=DAYS, lives=LIVES)
    better = sorted(_helps(job, long_job, figures), key=lambda one: -one.ratio)
    return EttrReport(
        job=long_job,
        figures=figures,
        costs=costs_of(long_job, figures),
        found=found,
        best_interval=best_interval(long_job, figures),
        helps=tuple(one for one in better if one.ratio > found.ratio + found.deviation),
    )


def steps_in_memory(job: Job) -> int:
    """Steps between checkpoints in the memory of the nodes; 0 where there are none."""
    mirror = job.checkpoint.mirror
    is_memory = mirror is not None and mirror.qualified_name == "forge-plugins-mirror:host_memory"
    return int(mirror.config.every) if mirror is not None and is_memory else 0


def checkpoint_bytes(job: Job, plan: Plan) -> float:
    """Parameters and optimizer state of the whole model.

    The state is as large, beside the parameters, as the plan finds it on its ranks.
    """
    held = sum(stage.parameter_bytes for stage in plan.stages)
    state = sum(stage.largest.get("optimizer", 0) for stage in plan.stages)
    of_parameter = 2 if job.train.precision == "bf16_pure" else 4
    return plan.parameters * of_parameter * (1 + state / held)


def as_text(report: EttrReport) -> Iterator[str]:
    """The report in lines."""
    job, found, costs = report.job, report.found, report.costs
    yield f"Effective training time on {job.gpus:,} GPUs: {found.ratio:.1%} of {LIVES} simulated lives of {DAYS:g} days"
    seconds = seconds_between_failures(job, report.figures)
    failures = "no failures" if math.isinf(seconds) else f"a failure every {duration(seconds)}"
    yield f"  {failures}; with planned stops {found.interruptions:.3g} interruptions a day"
    saved = "none but the last" if math.isinf(job.interval) else f"one every {duration(job.interval)}"
    best = "none" if math.isinf(report.best_interval) else f"one every {duration(report.best_interval)}"
    yield f"  checkpoints of {job.checkpoint_bytes / 1e9:,.1f} GB, {saved}; best is {best}"
    if not math.isinf(job.memory_interval):
        yield (
            f"  in memory, one every {duration(job.memory_interval)}, for which training waits "
            f"{costs.memory_blocked:.3f} s; a start from there takes {duration(costs.start + costs.memory_read)}"
        )
    there = costs.blocked + costs.written
    yield f"  for each, training waits {costs.blocked:.3f} s; it is there {there:.3g} s after it was begun"
    yield f"  steps of {job.step_seconds:.3g} s; a start takes {duration(costs.start + costs.read)}"
    yield ""
    yield "Lost, %"
    for loss in LOSSES:
        yield f"  {loss:<20}{100 * found.lost[loss]:>7.2f}"
    yield ""
    if report.helps:
        yield f"Most would help: {report.helps[0].what}: {report.helps[0].ratio:.1%}"
        yield from (f"  then {one.what}: {one.ratio:.1%}" for one in report.helps[1:])
    else:
        yield "Neither other checkpoints, time limits nor spare nodes would help"
    yield ""
    yield "Reckoned with (--assume NAME=NUMBER)"
    for name, value, unit, source in sources(report.figures):
        yield f"  {name:<29}{value:>9.4g} {unit:<5} {source}".rstrip()


def duration(seconds: float) -> str:
    """In the largest unit of which it has more than one."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds > 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _helps(job: Job, long_job: LongJob, figures: Figures) -> Iterator[Help]:
    """Single changes, each with the ratio that it would lead to."""
    offers = []
    if math.isfinite(best := best_interval(long_job, figures)):
        steps = math.ceil(best / long_job.step_seconds)
        interval = steps * long_job.step_seconds
        keys = f"checkpoint.interval = {steps}" + (", checkpoint.minutes = 0" if job.checkpoint.minutes else "")
        saved = f"a checkpoint every {duration(interval)} ({keys})"
        offers.append((saved, attrs.evolve(long_job, interval=interval), figures))
    short = max(SHORT_TIMEOUT, 10 * long_job.step_seconds)
    if short < long_job.step_timeout:
        offers.append((f"run.step_timeout = {short:.0f}", attrs.evolve(long_job, step_timeout=short), figures))
    if not long_job.background:
        offers.append(("checkpoint.background = true", attrs.evolve(long_job, background=True), figures))
    if figures.spares < SPARES:
        offers.append((f"{SPARES} spare nodes", long_job, attrs.evolve(figures, spares=float(SPARES))))
    for what, other, with_figures in offers:
        yield Help(what, simulate(other, with_figures, days=DAYS, lives=LIVES).ratio)
