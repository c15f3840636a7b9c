"""Metrics without their noise: exponential moving averages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import nearest_hint
from forge_plugins_monitor.config import SmoothedConfig


class Smoothed(Callback):
    """Reports ``smoothed/<metric>``: ``m ← alpha · x + (1 − alpha) · m`` over the values of the logged lines before,
    where ``m`` begins as the first one. Values that are not finite are left out.

    The host reads nothing: the values of the line itself are not among them, as they are still on their way.
    """

    def __init__(self, config: SmoothedConfig) -> None:
        self._config = config
        self._means: dict[str, float] = {}
        self._has_looked = False

    def step_logged(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        for name in self._config.metrics:
            value = metrics.get(name, math.nan)
            if math.isfinite(value):
                mean = self._means.get(name, value)
                self._means[name] = mean + self._config.alpha * (value - mean)
        if not self._has_looked:
            self._has_looked = True
            self._say_what_is_missing(run, step, metrics)

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if not context.logged or run.rank != 0:  # rank 0 alone is told of logged values, and writes the line
            return
        # what a pipeline ever reports it reports always; the line has null
        has_all = run.mesh.degrees["pp"] > 1
        names = [name for name in self._config.metrics if has_all or name in self._means]
        values = {f"smoothed/{name}": self._means.get(name, math.nan) for name in names}
        run.report({name: torch.full((), value, device=run.device) for name, value in values.items()})

    def _say_what_is_missing(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        for name in self._config.metrics:
            if name not in metrics and name not in self._means:
                hint = nearest_hint(name, metrics)
                run.log(f"smoothed: the line of step {step} has no {name!r}, which is smoothed once there is one{hint}")

    def state(self) -> Mapping[str, Any]:
        return {"means": dict(self._means)}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._means = dict(state["means"])
