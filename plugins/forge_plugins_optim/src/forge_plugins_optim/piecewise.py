"""Constant in parts, after a linear warm-up."""

from __future__ import annotations

from bisect import bisect_left

from forge_core.contracts.scheduler import Schedule
from forge_plugins_optim.schedule_config import PiecewiseConfig
from forge_plugins_optim.warm_up import refuse_contradictions


def piecewise(config: PiecewiseConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """``ratios[k] · min(1, step / W)``, with W steps of warm-up and ``boundaries[k − 1] < step ≤ boundaries[k]``.

    Raises:
        ConfigError: the warm-up is longer than the run, or a part has no step.
    """
    warmup = max(1, refuse_contradictions(config, total_steps, tokens_per_step))
    last_steps = config.last_steps(total_steps)
    return lambda step: config.ratios[bisect_left(last_steps, step)] * min(1.0, step / warmup)
