"""Conformance of schedulers (contract: ``forge_core.contracts.scheduler``). Needs no torch."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from forge_core.contracts.scheduler import Schedule
from forge_core.errors import ConfigError
from forge_testing.component_case import ComponentCase


class SchedulerConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "scheduler"
    total_steps: ClassVar[int] = 100
    """Length of the run that the configuration is for."""
    tokens_per_step: ClassVar[int] = 1000
    """Tokens of each of its steps."""

    def make(self, **given: Any) -> Any:
        return super().make(tokens_per_step=self.tokens_per_step, **given)

    def test_gives_a_finite_multiplier_at_every_step(self) -> None:
        schedule = self._schedule()

        for step in (*range(1, self.total_steps + 1), *self._steps_beyond()):
            multiplier = schedule(step)
            is_number = isinstance(multiplier, (int, float)) and not isinstance(multiplier, bool)
            assert is_number, f"the multiplier of step {step} must be a float, got {type(multiplier).__name__}"
            assert math.isfinite(multiplier), f"the multiplier of step {step} of {self.total_steps} is {multiplier}"
            assert multiplier >= 0, f"the multiplier of step {step} of {self.total_steps} is negative: {multiplier}"

    def test_depends_on_the_step_only(self) -> None:
        steps = (*range(1, self.total_steps + 1), *self._steps_beyond())
        schedule = self._schedule()
        forwards = {step: schedule(step) for step in steps}

        backwards = {step: schedule(step) for step in reversed(steps)}
        resumed = self._schedule()
        middle = steps[len(steps) // 2]

        for step in steps:
            assert backwards[step] == forwards[step], (
                f"the multiplier of step {step} changes with the order of calls, from {forwards[step]} to "
                f"{backwards[step]}; nothing of a schedule is saved, so it must be a pure function of the step"
            )
        assert resumed(middle) == forwards[middle], (
            f"a run that resumes at step {middle} has the multiplier {resumed(middle)} there, one that went straight "
            f"through has {forwards[middle]}"
        )

    def test_a_run_of_one_step_works_or_is_refused(self) -> None:
        try:
            schedule: Schedule = self.make(total_steps=1)
        except ConfigError:
            return  # a contradiction with the configuration under test, such as a longer warm-up
        except ArithmeticError as error:
            raise AssertionError(f"total_steps=1 raises {error!r} instead of a ConfigError or nothing") from error
        try:
            multiplier = schedule(1)
        except ArithmeticError as error:
            raise AssertionError(f"the only step of a run of one step raises {error!r}") from error

        assert math.isfinite(multiplier), f"the multiplier of the only step of a run of one step is {multiplier}"

    def _schedule(self) -> Schedule:
        schedule: Schedule = self.make(total_steps=self.total_steps)
        return schedule

    def _steps_beyond(self) -> tuple[int, ...]:
        return self.total_steps + 1, 2 * self.total_steps, 1000 * self.total_steps
