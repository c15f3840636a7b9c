"""Warm-up, stable, decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from forge_core.contracts.scheduler import Schedule
from forge_plugins_optim.schedule_config import WSDConfig
from forge_plugins_optim.warm_up import after_warm_up, refuse_contradictions


def wsd(config: WSDConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """1 up to step N − C, then ``m + (1 − m) · f(p)``, with N = ``total_steps``, C steps of cooldown, m = ``min_ratio``
    and p = min(1, (step − (N − C)) / C)::

        1-sqrt:  f(p) = 1 − sqrt(p)              (Hägele et al., 2024, https://arxiv.org/abs/2405.18392)
        linear:  f(p) = 1 − p
        cosine:  f(p) = (1 + cos(π · p)) / 2
        sqrt-of-rest:  f(p) = sqrt(1 − p)

    Raises:
        ConfigError: warm-up and cooldown are longer than the run.
    """
    warmup = refuse_contradictions(config, total_steps, tokens_per_step)
    cooldown, floor, shape = config.cooldown(total_steps), config.min_ratio, _SHAPES[config.shape]
    stable = total_steps - cooldown - warmup

    def rest(since: int) -> float:
        progress = min(1.0, max(0, since - stable) / cooldown)
        return floor + (1 - floor) * shape(progress)

    return after_warm_up(warmup, rest)


_SHAPES: Mapping[str, Callable[[float], float]] = {
    "1-sqrt": lambda p: 1 - math.sqrt(p),
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "sqrt-of-rest": lambda p: math.sqrt(1 - p),
}
