"""Schedules of the learning rate."""

from __future__ import annotations

from typing import Any, Protocol


class Schedule(Protocol):
    """A pure function, so that there is nothing to save."""

    def __call__(self, step: int, /) -> float:
        """The learning rate's multiplier for the update that completes step ``step``, which counts from 1 to
        ``total_steps``. Finite and not negative; defined for later steps too."""


class ScheduleFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
        """Build the schedule of a run of ``total_steps`` steps.

        Args:
            tokens_per_step: sequences of a step over all ranks times ``train.seq_len``, for what is told in tokens. A
                factory that needs it not may leave this keyword out.

        Raises:
            ConfigError: for a contradiction with ``total_steps``, such as a longer warm-up.
        """
