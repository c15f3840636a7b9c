"""No schedule."""

from __future__ import annotations

from forge_core.contracts.scheduler import Schedule
from forge_plugins_optim.schedule_config import NoneConfig


def none(config: NoneConfig, /, *, total_steps: int) -> Schedule:
    """1 at every step: for optimizers that have a schedule of their own."""
    return lambda step: 1.0
