"""Linear warm-up, then half a cosine."""

from __future__ import annotations

import math

from forge_core.contracts.scheduler import Schedule
from forge_core.errors import ConfigError
from forge_plugins_optim.config import CosineConfig


def cosine(config: CosineConfig, /, *, total_steps: int) -> Schedule:
    """With W = ``warmup_steps``, D = ``decay_steps`` or ``total_steps − W``, m = ``min_ratio``, and steps from 1::

        step ≤ W:  step / W
        step > W:  m + (1 − m) · (1 + cos(π · p)) / 2    where p = min(1, (step − W) / D)

    So the first update is not zero, update W has the whole base learning rate, update W + D and all later ones have
    ``m`` of it.

    Raises:
        ConfigError: the warm-up leaves no step to decay in.
    """
    for key, sentence in config.contradictions(total_steps):
        raise ConfigError(f"scheduler.{key} {sentence}")
    warmup, floor = config.warmup_steps, config.min_ratio
    decay = config.decay_steps or total_steps - warmup

    def multiplier(step: int) -> float:
        if step <= warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / decay)
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    return multiplier
