"""What a plan says of the time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from forge_core.config.sections import Job
from forge_plugins_plan.clock import PARTS, StuckError, step_time
from forge_plugins_plan.machine import Machine
from forge_plugins_plan.simulation import SimulatedRank


@attrs.frozen
class PlannedTime:
    """Of a step, in seconds, by a model of the machine."""

    machine: str
    """What it is, and where its figures are from."""
    seconds: float
    parts: Mapping[str, float]
    """Those of ``forge_plugins_plan.clock.PARTS``; they add up to ``seconds``."""
    hidden: float
    """Of collectives that run beside what is computed."""
    tokens_per_second: float
    """Of all ranks."""
    mfu: float
    """By the FLOPs that the plan calls ``standard``, which the metric ``mfu`` counts, too."""


def planned_time(
    job: Job,
    simulated: Sequence[SimulatedRank],
    machine: Machine,
    *,
    tokens: int,
    flops_per_token: float,
    ranks: int,
    compiled: bool,
) -> PlannedTime | None:
    """
    Args:
        simulated: a rank of each stage of the pipeline.
        tokens: of a step, of all ranks.
        compiled: blocks are compiled.

    Returns:
        Nothing if a step cannot be simulated, or its stages wait for each other.
    """
    stages = [(one.run, one.optimizer.changes) for one in simulated if one.optimizer is not None]
    if len(stages) < len(simulated):
        return None
    microbatches = (job.train.grad_accumulation or 1) if len(stages) == 1 else 1
    try:
        step = step_time(stages, machine, microbatches, compiled=compiled)
    except StuckError:
        return None
    speed = tokens / step.seconds
    mfu = mfu_of(job, machine, speed * flops_per_token / ranks)
    return PlannedTime(machine.words, step.seconds, step.parts, step.hidden, speed, mfu)


def mfu_of(job: Job, machine: Machine, flops: float) -> float:
    """The share of a rank's peak that these FLOP/s are."""
    return flops / machine.peak_flops("float32" if job.train.precision == "fp32" else "bfloat16")


PART_WORDS = {
    "products": "products of matrices",
    "attention": "attention",
    "memory": "all else in forward and backward",
    "optimizer": "optimizer",
    "communication": "communication, exposed",
    "bubble": "bubble of the pipeline",
    "host": "waiting for Python",
}
"""Of each part, for people."""


def time_lines(time: PlannedTime, ranks: int) -> Iterator[str]:
    """The time in lines."""
    unit, scale = ("s", 1.0) if time.seconds >= 1 else ("ms", 1e3)
    yield f"{f'Time of a step, {unit}':<46}{'':>12}{'%':>8}"
    for part in PARTS:
        if time.parts[part] / time.seconds >= 5e-4:
            yield f"  {PART_WORDS[part]:<44}{time.parts[part] * scale:>12.3f}{time.parts[part] / time.seconds:>8.1%}"
    yield f"  {'all':<44}{time.seconds * scale:>12.3f}"
    beside = f"; {time.hidden * scale:.3g} {unit} of communication beside it" if time.hidden > 0 else ""
    a_rank = f", {time.tokens_per_second / ranks:,.0f} a rank" if ranks > 1 else ""
    yield f"  {time.tokens_per_second:,.0f} tokens/s{a_rank}; MFU {time.mfu:.1%}{beside}"
    yield f"  By {time.machine}"
