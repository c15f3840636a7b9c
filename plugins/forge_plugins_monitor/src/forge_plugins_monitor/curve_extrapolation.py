"""Where the loss of a run will be at its end, if it goes on as it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import attrs
import torch

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_plugins_monitor.config import CurveExtrapolationConfig
from forge_plugins_monitor.logged_steps import is_due
from forge_plugins_monitor.report.power_law import fit

LEAST_STRETCHES = 20
"""Stretches of the curve below which nothing is reported: in fewer, noise decides the irreducible loss."""
_GROWTH = 1.1
"""A stretch ends at so many times the step at which it began: a power law is a line over their logarithms."""


class CurveExtrapolation(Callback):
    """Reports ``predicted_final_loss``: ``E + A · step^−α`` at the last step, fitted to the losses that have been
    logged after ``skip`` steps (Henighan et al. 2020, arXiv:2010.14701, for its form).

    The losses are kept as means over stretches, each 10 % of its step long, so that state and fit stay small. The host
    reads nothing: the loss of the step itself is not among them, as it is still on its way.
    """

    def __init__(self, config: CurveExtrapolationConfig) -> None:
        self._config = config
        self._stretches: dict[int, Stretch] = {}

    def run_start(self, run: RunContext) -> None:
        if run.rank != 0:
            return
        every, skip = run.job.metrics.interval, self._config.skip
        logged = chain((1,), range(every, run.total_steps, every))  # the last one comes after the last prediction
        if (found := len({_stretch_of(step) for step in logged if step > skip})) < LEAST_STRETCHES:
            run.log(
                f"curve_extrapolation: predicts nothing in this run, whose logged steps after skip = {skip} make up "
                f"{found} stretches of {_GROWTH - 1:.0%} each, of {LEAST_STRETCHES} that it takes; lower skip, or "
                f"metrics.interval = {every}"
            )

    def step_logged(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        loss = metrics["loss"]
        if step > self._config.skip and math.isfinite(loss) and loss > 0:
            self._stretches.setdefault(_stretch_of(step), Stretch()).add(step, loss)

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if not context.logged or run.rank != 0:  # the first rank alone is told of logged losses, and writes the line
            return
        predicted = self._predicted(run.total_steps) if is_due(run, context.step, self._config.interval) else None
        if predicted is not None:
            run.report({"predicted_final_loss": _on_device(predicted, run)})
        elif run.mesh.degrees["pp"] > 1:  # what a pipeline ever reports it reports always; the line has null
            run.report({"predicted_final_loss": _on_device(math.nan, run)})

    def _predicted(self, last_step: int) -> float | None:
        """``None`` where the curve is too short, or does not fall."""
        if len(self._stretches) < LEAST_STRETCHES:
            return None
        stretches = [self._stretches[number] for number in sorted(self._stretches)]
        law = fit(
            [one.steps / one.count for one in stretches],
            [one.losses / one.count for one in stretches],
            with_floor=True,
            weights=[one.count for one in stretches],
        )
        return law(last_step) if law.exponent > 0 else None

    def state(self) -> Mapping[str, Any]:
        return {"stretches": {str(number): [*attrs.astuple(one)] for number, one in self._stretches.items()}}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._stretches = {int(number): Stretch(*sums) for number, sums in state["stretches"].items()}


@attrs.define
class Stretch:
    """Neighbouring losses, added up."""

    count: int = 0
    steps: float = 0.0
    losses: float = 0.0

    def add(self, step: int, loss: float) -> None:
        self.count += 1
        self.steps += step
        self.losses += loss


def _stretch_of(step: int) -> int:
    return math.floor(math.log(step) / math.log(_GROWTH))


def _on_device(value: float, run: RunContext) -> torch.Tensor:
    return torch.full((), value, device=run.device)  # torch.tensor would copy, and wait for the device
