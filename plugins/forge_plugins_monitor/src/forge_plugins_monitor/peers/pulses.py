"""Pulses: who has given a sign of life lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

SILENCE = 3.0
"""Seconds without a sign of life after which a rank, or a node, is said to be gone."""


class Pulses:
    """When each of several has given its last sign of life. A sign is a count that has changed: clocks differ."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}

    def seconds_since(self, number: int, count: int) -> float:
        """Note the ``count`` of one, and return for how long it has been the same."""
        known, now = self._last.get(number), time.monotonic()
        if known is None or known[0] != count:
            self._last[number] = count, now
            return 0.0
        return now - known[1]

    def first_alive(self, numbers: Iterable[int], own: int, count_of: Callable[[int], int | None]) -> int:
        """The first that is not silent: all who ask come to the same one, without a word to each other.

        Args:
            own: the number of who asks, for whom no count is needed.
            count_of: ``None`` for one that has ended.
        """
        for number in numbers:
            if number == own:
                break
            count = count_of(number)
            if count is not None and self.seconds_since(number, count) < SILENCE:
                return number
        return own
