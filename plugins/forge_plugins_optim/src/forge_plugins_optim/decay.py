"""Schedules that fall over the run, or over ``decay_steps``, after a linear warm-up.

With W steps of warm-up, D = ``decay_steps`` or ``total_steps − W``, m = ``min_ratio``, p = min(1, (step − W) / D), and
steps from 1, the first update has 1/W of the learning rate, update W has all of it, update W + D and all later ones
have m of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from forge_core.contracts.scheduler import Schedule
from forge_plugins_optim.schedule_config import CosineConfig, LinearConfig, PolynomialConfig, RexConfig
from forge_plugins_optim.warm_up import after_warm_up, refuse_contradictions


def cosine(config: CosineConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """``m + (1 − m) · (1 + cos(π · p)) / 2``.

    Raises:
        ConfigError: the warm-up leaves no step to decay in.
    """
    floor = config.min_ratio
    fall = lambda p: floor + (1 - floor) * (1 + math.cos(math.pi * p)) / 2  # noqa: E731 - a formula
    return _decay(config, total_steps, tokens_per_step, fall)


def linear(config: LinearConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """``1 − (1 − m) · p``.

    Raises:
        ConfigError: the warm-up leaves no step to decay in.
    """
    return _decay(config, total_steps, tokens_per_step, lambda p: 1 - (1 - config.min_ratio) * p)


def polynomial(config: PolynomialConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """``max(m, (1 − p)^power)``.

    Raises:
        ConfigError: the warm-up leaves no step to decay in.
    """
    return _decay(config, total_steps, tokens_per_step, lambda p: max(config.min_ratio, (1 - p) ** config.power))


def rex(config: RexConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """``max(m, (1 − p) / (1/2 + (1 − p)/2))`` (Chen et al., 2021, https://arxiv.org/abs/2107.04197).

    Raises:
        ConfigError: the warm-up leaves no step to decay in.
    """
    return _decay(
        config, total_steps, tokens_per_step, lambda p: max(config.min_ratio, (1 - p) / (0.5 + 0.5 * (1 - p)))
    )


def _decay(
    config: CosineConfig | LinearConfig | PolynomialConfig | RexConfig,
    total_steps: int,
    tokens_per_step: int,
    fall: Callable[[float], float],
) -> Schedule:
    """
    Args:
        fall: of the part p of the decay that is done, from 0 to 1.
    """
    warmup = refuse_contradictions(config, total_steps, tokens_per_step)
    decay = config.decay_steps or total_steps - warmup
    return after_warm_up(warmup, lambda since: fall(min(1.0, since / decay)))
