"""A run's schedule, each of whose multipliers is looked at before an update is made with it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from forge_core.contracts.scheduler import Schedule
from forge_core.errors import PluginError

_LOOKED_AT_BEFORE = 1000
"""Steps, spread over the run, whose multipliers are computed before the first one: for a run of any length, in
milliseconds."""


class CheckedSchedule:
    """Args:
    words: names the component in messages.

    Raises:
        PluginError: a multiplier of the run is not finite or negative; here if it is found before the run.
    """

    def __init__(self, schedule: Schedule, words: str, total_steps: int) -> None:
        self._schedule = schedule
        self._words = words
        for step in range(1, total_steps + 1, -(-total_steps // _LOOKED_AT_BEFORE)):
            self(step)

    def __call__(self, step: int, /) -> float:
        multiplier: Any = self._schedule(step)
        if not isinstance(multiplier, Real):
            found = f"a {type(multiplier).__name__}"
        elif not (math.isfinite(multiplier) and float(multiplier) >= 0):
            found = str(multiplier)
        else:
            return float(multiplier)
        raise PluginError(
            f"{self._words} gives {found} as the learning rate's multiplier of step {step}; it must be a finite "
            "number, and not negative. This is a bug in the schedule."
        )
