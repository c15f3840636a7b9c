"""Trackers: where metrics are sent. A failing tracker is reported once and never stops training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Lives on the first rank only."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with host values for each logged step and each evaluation; units are those of ``metrics.jsonl``."""
        ...

    def close(self, outcome: str) -> None:
        """Called once. ``outcome`` is ``"completed"``, ``"stopped"`` or ``"failed"``."""
        ...


class TrackerFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, run_name: str, run_dir: Path, job: Mapping[str, Any]) -> Tracker:
        """Build the tracker; ``job`` is the resolved configuration as plain data, to be recorded."""
        ...
