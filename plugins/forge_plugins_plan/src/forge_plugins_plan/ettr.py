"""The effective training time ratio of a long job: time of steps that stay, over time.

Lives of a job are simulated from interruption to interruption: it trains and saves, is interrupted, and somebody
notices; a node may be waited for; processes are started, and read the last checkpoint; steps since then are lost.
Interruptions come as a Poisson process, while it trains and while it starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from statistics import fmean, stdev

import attrs

from forge_plugins_plan.figures import Figures
from forge_plugins_plan.lives import LOSSES, Life, LifeOfReplicas
from forge_plugins_plan.long_job import DAY, LongJob


@attrs.frozen(kw_only=True)
class Ettr:
    """Simulated lives of a job."""

    ratio: float
    deviation: float
    """Standard error of the ratio, from life to life; 0 for a single one."""
    lost: Mapping[str, float]
    """Parts of all time, by ``LOSSES``; with the ratio they add up to 1."""
    interruptions: float
    """A day."""

    @property
    def costs_most(self) -> str:
        """The largest of the losses."""
        return max(LOSSES, key=lambda loss: self.lost[loss])


def simulate(job: LongJob, figures: Figures, *, days: float = 90.0, lives: int = 20, seed: int = 0) -> Ettr:
    """Simulate ``lives`` of ``days`` each. The same seed gives the same lives.

    Steps that are not saved at the end of a life stay.
    """
    kind = Life if figures.replicas == 1 else LifeOfReplicas
    found = [kind(job, figures, Random(f"{seed}/{number}"), days * DAY) for number in range(lives)]
    for life in found:
        life.live()
    ratios = [life.kept / life.time for life in found]
    total = sum(life.time for life in found)
    return Ettr(
        ratio=sum(life.kept for life in found) / total,
        deviation=stdev(ratios) / math.sqrt(lives) if lives > 1 else 0.0,
        lost={loss: sum(life.lost[loss] for life in found) / total for loss in LOSSES},
        interruptions=fmean(life.interruptions for life in found) / days,
    )
