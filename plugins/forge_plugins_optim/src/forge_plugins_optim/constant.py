"""The base learning rate throughout, after a linear warm-up."""

from __future__ import annotations

from forge_core.contracts.scheduler import Schedule
from forge_plugins_optim.schedule_config import ConstantConfig
from forge_plugins_optim.warm_up import after_warm_up, refuse_contradictions


def constant(config: ConstantConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """With W steps of warm-up: ``min(1, step / W)``, and 1 where W = 0. The first update is never zero.

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    return after_warm_up(refuse_contradictions(config, total_steps, tokens_per_step), lambda since: 1.0)
