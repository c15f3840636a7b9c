"""The end of this start of a run, by the clock: the run saves and stops before it comes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from forge_core.config.sections import RunSection
from forge_core.config.time_limit import DEFAULT_LEAD, seconds_of
from forge_core.contracts.callback import TIME_LIMIT, Requests
from forge_core.distributed.cluster import CLUSTER, JOB_END
from forge_core.errors import ConfigError
from forge_core.run.directory import ENDS

_SAVES_TO_LEARN_FROM = 10


class TimeLimit:
    """The earlier of ``run.time_limit`` and the end of the cluster's job; there may be none.

    Args:
        started: when this start of the run began, by ``time.monotonic()``.

    Raises:
        ConfigError: it is too near for anything to be trained.
    """

    def __init__(self, run: RunSection, started: float, environment: Mapping[str, str] = os.environ) -> None:
        self._lead = DEFAULT_LEAD if run.stop_before_end is None else run.stop_before_end
        ends: dict[str, float] = {}
        if run.time_limit is not None:
            ends[f"run.time_limit = {run.time_limit!r}"] = started + seconds_of(run.time_limit)
        job_end = float(environment.get(JOB_END) or 0)
        if job_end > time.time():  # else a shell has kept it from a job that is over
            ends[f"the end of the {environment[CLUSTER]} job"] = time.monotonic() + job_end - time.time()
        self._what = min(ends, key=lambda what: ends[what], default="")
        self._end = ends.get(self._what)
        if self._end is not None and self._seconds_left() <= 0:
            raise ConfigError(
                f"{self._what} is {max(0.0, self._end - time.monotonic()):.0f} s away, and the run stops "
                f"run.stop_before_end = {self._lead:g} s before it: nothing would be trained. Ask for more time, or "
                "lower run.stop_before_end."
            )

    def learn(self, events: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> None:
        """Stop earlier, if earlier starts of the run have needed more time for that than the lead leaves.

        Half of what is left is trained in any case: a disk that was slow once must not end a run for ever.

        Args:
            events: of ``events.jsonl``.
        """
        if self._end is None:
            return
        saves = [float(event["seconds"]) for event in events if event["event"] in ("saved", "mirrored")]
        slowest = max(saves[-_SAVES_TO_LEARN_FROM:], default=0.0)
        killed_at = _lead_of_a_stop_that_was_cut_short(events)
        needed = 2 * max(slowest, killed_at)
        if needed <= self._lead:
            return
        why = (
            f"saving has taken {slowest:.0f} s in an earlier start"
            if slowest >= killed_at
            else f"the last start was told to stop {killed_at:.0f} s before its end, and was killed while it did"
        )
        half = (self._end - time.monotonic()) / 2
        self._lead = max(self._lead, min(needed, half))
        say(f"{why}: this one will stop {self._lead:.0f} s before {self._what}")

    @contextmanager
    def watched(self, requests: Requests, say: Callable[[str], None], note: Callable[[float], None]) -> Iterator[None]:
        """Ask the run to stop when the time comes. One rank is enough.

        Args:
            note: told, from another thread, how many seconds there are then.
        """
        if self._end is None:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while (left := self._seconds_left()) > 0:
                if over.wait(min(left, 1.0)):
                    return
            if not requests.stop:
                requests.stop = TIME_LIMIT
                say(f"{self._what} comes in {self._lead:g} s: will save and stop after this step")
            note(self._lead)

        thread = threading.Thread(target=watch, name="forge-deadline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def must_hold(self, seconds: float, say: Callable[[str], None]) -> None:
        """Stop earlier from now on, if a save has taken too long for the time that was meant for it and a step."""
        if self._end is not None and 2 * seconds > self._lead:
            say(
                f"saving took {seconds:.0f} s, for which run.stop_before_end = {self._lead:g} s leaves too little: the "
                f"run will stop {2 * seconds:.0f} s before {self._what}"
            )
            self._lead = 2 * seconds

    def _seconds_left(self) -> float:
        """Until the run is asked to stop."""
        assert self._end is not None
        return self._end - self._lead - time.monotonic()


def _lead_of_a_stop_that_was_cut_short(events: Sequence[Mapping[str, Any]]) -> float:
    """0 unless the clock has told the last start to stop, and that has not come to an end of its own."""
    for event in reversed(events):
        if event["event"] == "stopping":
            return float(event["lead"])
        if event["event"] in ("started", "resumed", *ENDS):
            return 0.0
    return 0.0
