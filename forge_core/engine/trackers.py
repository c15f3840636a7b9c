"""The trackers that a job names. One that fails is reported, and asked no more; training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from forge_core.builder import ComponentBuilder
from forge_core.config.job import job_table
from forge_core.config.sections import Job
from forge_core.contracts.tracker import Tracker


class Trackers:
    """On the first rank, all of them; on the others, none."""

    def __init__(
        self, build: ComponentBuilder, job: Job, run_dir: Path, say: Callable[[str], None], *, active: bool
    ) -> None:
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        for place, use in enumerate(job.trackers if active else ()):
            name = f"trackers[{place}] {use.qualified_name}"
            try:
                self._trackers[name] = build(use, run_name=str(job.run.name), run_dir=run_dir, job=job_table(job))
            except Exception as error:  # noqa: BLE001 - whatever a third party raises must not stop training
                self._give_up(name, error)

    def log(self, values: Mapping[str, float]) -> None:
        """``values`` has ``step`` among them."""
        metrics = {name: value for name, value in values.items() if name != "step"}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(int(values["step"]), metrics)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(name, error)

    def close(self, outcome: str) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close(outcome)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        self._say(f"{name} failed and is not asked again: {type(error).__name__}: {error}")
