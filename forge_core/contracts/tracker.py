"""Trackers: where metrics are sent. One that is slow or fails is named once, and never holds up training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tracker:
    """Base class. Lives on rank 0 only, on a thread of its own, from its factory to ``close``. Override what
    you need."""

    state_version: int = 1
    """Saved with the state; ``load_state`` is given the saved one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with host values for each logged step and each evaluation; units are those of ``metrics.jsonl``."""

    def log_series(self, step: int, series: Mapping[str, Sequence[float]]) -> None:
        """Called with values that belong together, such as ``load/<layer>``: one for each expert, in their order. To be
        drawn as a histogram, or left out by a service that draws none."""

    def log_figure(self, step: int, name: str, path: Path) -> None:
        """Called with a picture that a callback has drawn (``RunContext.track_figure``): a file such as a PNG, which
        stays where it is at least until this returns."""

    def close(self, outcome: str) -> None:
        """Called once. ``outcome`` is ``"completed"``, ``"stopped"`` or ``"failed"``."""

    def state(self) -> Mapping[str, Any]:
        """State that survives a resume, such as the run's id at a service, as JSON values. Saved with each checkpoint
        under ``plugin.<distribution>.tracker.<name>``, after all lines up to there have been given to ``log``."""
        return {}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        """Given what ``state`` returned when the checkpoint was saved that the run goes on from, before the first
        ``log``. Not called on a fresh start."""


class TrackerFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, run_name: str, run_dir: Path, job: Mapping[str, Any]) -> Tracker:
        """Build the tracker; ``job`` is the resolved configuration as plain data, to be recorded. A service that must
        know at once whether a run is new is best called in the first ``log``."""
