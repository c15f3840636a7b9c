"""Python's garbage collection at steps of its own."""

from __future__ import annotations

import gc

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_plugins_monitor.config import GarbageCollectionConfig


class GarbageCollection(Callback):
    """Collects in every ``interval``-th step, on all ranks the same, and never between.

    By itself, Python collects when it has counted enough new objects, on each rank at another moment, and in each step
    all ranks wait for the one that collects.
    """

    def __init__(self, config: GarbageCollectionConfig) -> None:
        self._interval = config.interval
        self._was_enabled = True

    def run_start(self, run: RunContext) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if context.step % self._interval == 0:
            gc.collect()

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        self._enable_again()

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._enable_again()

    def _enable_again(self) -> None:
        if self._was_enabled:
            gc.enable()
