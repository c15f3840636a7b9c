"""The step timeout: a rank that does not come forward says so, and ends with exit code 5."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import attrs

from forge_core.config.describe import printable
from forge_core.errors import ExitCode
from forge_plugins_monitor.peers.watchdog import Watchdog

SAY_AFTER, LEAVE_AFTER = 3.5, 6.0
"""Seconds beyond its limit after which a rank that is held up says so, and after which it leaves. Before that, it may
be found out who is missing. The watchdog, which needs nothing of the rank, comes later."""


@attrs.frozen
class End:
    """A moment from which this rank should not be here any longer, and why."""

    since: float
    """By ``time.monotonic``; it may be to come."""
    sentence: str
    say_after: float = SAY_AFTER
    leave_after: float = LEAVE_AFTER


class StepTimeout:
    """Seconds that this rank may take from its last beat. A thread ends it where it waits for a device, or in a
    collective of which no error comes; the watchdog ends it where no thread of Python runs.

    Args:
        limit: seconds.
        watchdog: of this process.
    """

    def __init__(self, limit: float, watchdog: Watchdog) -> None:
        self.limit = limit
        self.seconds = limit
        """The seconds that the last beat has allowed."""
        self.beaten = time.monotonic()
        self._watchdog = watchdog
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, step: int, more: float = 0.0) -> None:
        self.allow(step, self.limit + more)

    def allow(self, step: int, seconds: float) -> None:
        """Take so many seconds at most from here."""
        self.seconds = seconds
        self.beaten = time.monotonic()
        self._watchdog.tell(step, seconds)

    @property
    def is_late(self) -> bool:
        """Return whether a third of the time has passed."""
        return time.monotonic() - self.beaten > self.seconds / 3

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self.beaten > self.seconds

    def guard(self, end: Callable[[], End], last_words: Callable[[], None] = lambda: None) -> None:
        """Start the thread.

        Args:
            end: of this rank, as it stands; asked four times a second.
            last_words: called when it has said that it will leave.
        """
        arguments = (end, last_words)
        self._thread = threading.Thread(target=self._guard, args=arguments, name="forge-peers-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=3)
        self._watchdog.close()

    def _guard(self, end_now: Callable[[], End], last_words: Callable[[], None]) -> None:
        has_said = False
        while not self._ended.wait(0.25):
            now, end = time.monotonic(), end_now()
            if now - end.since > end.say_after and not has_said:
                has_said = True
                print(printable(f"error: {end.sentence}"), file=sys.stderr, flush=True)
                last_words()
            if now - end.since > end.leave_after:
                os._exit(ExitCode.LOST_PEER)
