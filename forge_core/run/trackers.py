"""The trackers that a job names, each on a thread of its own: one that is slow or fails does not hold up training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any

import attrs

from forge_core.checkpoint.component_state import by_namespace, state_entry
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.tracker import Tracker
from forge_core.job import job_table

SLOW_LINE = 1.0
"""Seconds that a line may take before its tracker is named."""
_WAITING = 1000
"""Lines that a tracker may be behind. Those after them it is not given."""


class Trackers:
    """On rank 0, all of them; on the others, none.

    Args:
        saved: what ``states`` returned when the checkpoint was saved that the run goes on from.
    """

    def __init__(
        self,
        build: ComponentBuilder,
        job: Job,
        run_dir: Path,
        say: Callable[[str], None],
        saved: Mapping[str, Any],
        *,
        active: bool,
    ) -> None:
        self._patience = job.run.trackers_timeout
        names = [(f"plugin.{use.provider}.tracker.{use.name}", (index, use)) for index, use in enumerate(job.trackers)]
        self._served: list[_Served] = []
        for namespace, (index, use) in by_namespace(names if active else []):
            made = partial(build, use, run_name=str(job.run.name), run_dir=run_dir, job=job_table(job))
            with redirect_stdout(sys.stdout):  # it is the process' again, also if the factory goes on printing
                one = _Served(f"trackers[{index}] {use.qualified_name}", namespace, made, saved.get(namespace, {}), say)
                # one after the other, as what a factory prints is caught for the whole process; and before the first
                # step, when its files in the run's directory are there
                is_built = one.is_built.wait(self._patience)
            if not is_built:
                say(f"{one.name} is not ready in time (run.trackers_timeout); training does not wait for it")
            self._served.append(one)
        known = {one.namespace for one in self._served}
        for namespace in sorted(saved.keys() - known) if active else ():
            say(f"the checkpoint has state of {namespace}, which this job does not name; it is dropped")

    def log(self, values: Mapping[str, float]) -> None:
        """``values`` has ``step`` among them."""
        metrics = {name: value for name, value in values.items() if name != "step"}
        for one in self._served:
            one.give_line(lambda tracker: tracker.log(int(values["step"]), dict(metrics)))

    def log_series(self, step: int, series: Mapping[str, Sequence[float]]) -> None:
        now = {name: list(values) for name, values in series.items()}  # whoever calls may go on using its lists
        for one in self._served:
            one.give_line(lambda tracker: tracker.log_series(step, now))

    def log_figure(self, step: int, name: str, path: Path) -> None:
        for one in self._served:
            one.give_line(lambda tracker: tracker.log_figure(step, name, path))

    def states(self) -> Mapping[str, Any]:
        """By namespace, to be saved: each after all lines that have been logged. That of one that has failed, or that
        is not done with them in time, stays as it was: its run goes on at the next start."""
        by = time.monotonic() + self._patience
        asked = [(one, one.ask(one.take_state)) for one in self._served if one.has_state]
        for one, answered in asked:
            if not answered.wait(max(0.0, by - time.monotonic())):
                one.complain("is not done with its lines in time (run.trackers_timeout); its state is saved as it was")
        return {one.namespace: one.state for one in self._served if one.state}

    def close(self, outcome: str) -> None:
        by = time.monotonic() + self._patience
        closing = [(one, one.begin_to_close(outcome)) for one in self._served]
        for one, closed in closing:
            one.wait_until_closed(closed, by)


@attrs.define(eq=False)
class _Served:
    """One tracker and its thread, on which all of it happens, from its factory to ``close``."""

    name: str
    namespace: str
    build: Callable[[], Tracker]
    state: dict[str, Any]
    """The newest that is known; empty if it has none."""
    say: Callable[[str], None]
    is_built: Event = attrs.field(init=False)
    _tracker: Tracker = attrs.field(init=False)
    """There once it is built."""
    _asked: Queue[tuple[Callable[[], object], Event] | None] = attrs.field(factory=Queue, init=False)
    """Requests, each with what is set when it is done, also if it has failed, or had failed before; then ``None``."""
    _has_failed: bool = attrs.field(default=False, init=False)
    has_state: bool = attrs.field(default=False, init=False)
    _is_named: bool = attrs.field(default=False, init=False)
    _not_given: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.is_built = self.ask(self._build)
        Thread(target=self._serve, name=f"forge-{self.name}", daemon=True).start()

    def give_line(self, line: Callable[[Tracker], object]) -> None:
        if self._asked.qsize() < _WAITING:
            self.ask(lambda: self._timed(line))
        else:
            self._not_given += 1

    def begin_to_close(self, outcome: str) -> Event:
        closed = self.ask(lambda: self._tracker.close(outcome))
        self._asked.put(None)
        return closed

    def wait_until_closed(self, closed: Event, by: float) -> None:
        if not closed.wait(max(0.0, by - time.monotonic())):
            n_left = max(0, self._asked.qsize() - 1)  # without the mark of the end
            self.say(f"{self.name} is not done in time (run.trackers_timeout) and is left, with {n_left} lines or more")
        if self._not_given:
            self.say(f"{self.name} was not given {self._not_given} lines, as it was {_WAITING} behind")

    def ask(self, do: Callable[[], object]) -> Event:
        done = Event()
        self._asked.put((do, done))
        return done

    def _serve(self) -> None:
        while (request := self._asked.get()) is not None:
            do, done = request
            try:
                if not self._has_failed:
                    do()
            except BaseException as error:  # noqa: BLE001 - an error of a third party must not stop training
                self.say(f"{self.name} failed and is not asked again: {type(error).__name__}: {error}")
                self._has_failed, self.has_state = True, False
            done.set()

    def _build(self) -> None:
        self._tracker = self.build()
        if self.state:
            self._tracker.load_state(self.state["state"], self.state["version"])
        self.has_state = type(self._tracker).state is not Tracker.state

    def take_state(self) -> None:
        self.state = state_entry(self.namespace, self._tracker) or self.state

    def _timed(self, line: Callable[[Tracker], object]) -> None:
        started = time.monotonic()
        line(self._tracker)
        if (seconds := time.monotonic() - started) > SLOW_LINE:
            self.complain(f"takes {seconds:.1f} s for a line; training does not wait for it")

    def complain(self, what: str) -> None:
        """Once."""
        if not self._is_named:
            self._is_named = True
            self.say(f"{self.name} {what}")
