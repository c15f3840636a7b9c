"""The base learning rate throughout, after a linear warm-up."""

from __future__ import annotations

from forge_core.contracts.scheduler import Schedule
from forge_core.errors import ConfigError
from forge_plugins_optim.config import ConstantConfig


def constant(config: ConstantConfig, /, *, total_steps: int) -> Schedule:
    """With W = ``warmup_steps``: ``min(1, step / W)``, and 1 where W = 0. The first update is never zero.

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    for key, sentence in config.contradictions(total_steps):
        raise ConfigError(f"scheduler.{key} {sentence}")
    warmup = max(1, config.warmup_steps)

    def multiplier(step: int) -> float:
        return min(1.0, step / warmup)

    return multiplier
