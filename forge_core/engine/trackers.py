"""The trackers that a job names. One that fails is reported, and asked no more; training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.builder import ComponentBuilder
from forge_core.config.job import job_table
from forge_core.config.sections import Job
from forge_core.contracts.tracker import Tracker
from forge_core.engine.kept_state import by_namespace, state_entry


@attrs.frozen
class _Asked:
    """A tracker that has not failed."""

    name: str
    namespace: str
    tracker: Tracker


class Trackers:
    """On the first rank, all of them; on the others, none.

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
        self._say = say
        self._asked: list[_Asked] = []
        self._states: dict[str, Any] = {}
        names = [(f"plugin.{use.provider}.tracker.{use.name}", (place, use)) for place, use in enumerate(job.trackers)]
        for namespace, (place, use) in by_namespace(names if active else []):
            name = f"trackers[{place}] {use.qualified_name}"
            if namespace in saved:
                self._states[namespace] = saved[namespace]
            try:
                tracker = build(use, run_name=str(job.run.name), run_dir=run_dir, job=job_table(job))
                if namespace in saved:
                    tracker.load_state(saved[namespace]["state"], saved[namespace]["version"])
            except Exception as error:  # noqa: BLE001 - whatever a third party raises must not stop training
                self._report(name, error)
            else:
                self._asked.append(_Asked(name, namespace, tracker))
        for namespace in sorted(saved.keys() - self._states.keys()) if active else ():
            say(f"the checkpoint has state of {namespace}, which this job does not name; it is dropped")

    def log(self, values: Mapping[str, float]) -> None:
        """``values`` has ``step`` among them."""
        metrics = {name: value for name, value in values.items() if name != "step"}
        self._ask_all(lambda asked: asked.tracker.log(int(values["step"]), metrics))

    def log_series(self, step: int, series: Mapping[str, Sequence[float]]) -> None:
        self._ask_all(lambda asked: asked.tracker.log_series(step, series))

    def states(self) -> Mapping[str, Any]:
        """By namespace, to be saved. That of one that has failed stays as it was: its run goes on at the next start."""
        self._ask_all(self._take_state)
        return dict(self._states)

    def close(self, outcome: str) -> None:
        self._ask_all(lambda asked: asked.tracker.close(outcome))

    def _take_state(self, asked: _Asked) -> None:
        entry = state_entry(asked.namespace, asked.tracker)
        if entry:
            self._states[asked.namespace] = entry

    def _ask_all(self, question: Callable[[_Asked], None]) -> None:
        for asked in list(self._asked):
            try:
                question(asked)
            except Exception as error:  # noqa: BLE001 - as above
                self._asked.remove(asked)
                self._report(asked.name, error)

    def _report(self, name: str, error: Exception) -> None:
        self._say(f"{name} failed and is not asked again: {type(error).__name__}: {error}")
