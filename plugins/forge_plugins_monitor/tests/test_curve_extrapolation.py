"""``curve_extrapolation`` finds the end of curves that follow a power law."""

import json
import math
import random
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from forge_core.checkpoint.component_state import state_entry
from forge_core.contracts.callback import OneRank, StepContext
from forge_plugins_monitor.config import CurveExtrapolationConfig
from forge_plugins_monitor.curve_extrapolation import LEAST_STRETCHES, CurveExtrapolation
from forge_testing.callback import CallbackConformance

LAST = 20_000


class TestCurveExtrapolation(CallbackConformance):
    component = "forge-plugins-monitor:curve_extrapolation"
    config: ClassVar = {"skip": 0, "interval": 1}

    def test_reports_nothing_of_a_short_run(self, tmp_path) -> None:
        _, run = self.start(tmp_path)

        run.go()

        assert run.reports == []


class Curve:
    """Steps that are logged every ten, one step late, as a run does."""

    def __init__(self, callback, loss, pp=1, last=LAST, every=10):
        self.callback, self.loss = callback, loss
        self.reported, self.said = {}, []
        mesh = OneRank()
        mesh.degrees = {"pp": pp}
        self.run = SimpleNamespace(
            rank=0,
            mesh=mesh,
            device=torch.device("cpu"),
            total_steps=last,
            job=SimpleNamespace(metrics=SimpleNamespace(interval=every)),
            report=self._report,
            log=self.said.append,
        )
        callback.run_start(self.run)

    def _report(self, values):
        ((name, value),) = values.items()
        assert name == "predicted_final_loss"
        self.reported[self.step] = value.item()

    def go(self, first, last):
        every = self.run.job.metrics.interval
        for self.step in range(first, last + 1, every):
            if self.step > first:
                self.callback.step_logged(self.run, self.step - every, {"loss": self.loss(self.step - every)})
            context = StepContext(self.step, 0, {}, logged=True)
            self.callback.step_end(self.run, context)
        self.callback.step_logged(self.run, last, {"loss": self.loss(last)})
        return self


def planted(step, noise=0.0):
    """1.7 + 8 · step^−0.35, on each of whose values the dice fall the same each time."""
    return 1.7 + 8 * step**-0.35 + noise * random.Random(step).gauss(0, 1)


def extrapolation(**config):
    return CurveExtrapolation(CurveExtrapolationConfig(**config))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_end_of_a_planted_curve_is_found(noise):
    curve = Curve(extrapolation(interval=500), lambda step: planted(step, noise)).go(10, LAST // 4)

    assert curve.reported[LAST // 4] == pytest.approx(planted(LAST), rel=0.01)


def test_nothing_is_reported_before_there_are_enough_stretches_and_then_at_the_interval():
    curve = Curve(extrapolation(interval=200, skip=200), planted).go(10, 3_000)

    first = min(curve.reported)
    assert 200 * 1.1 ** (LEAST_STRETCHES - 2) < first < 200 * 1.1 ** (LEAST_STRETCHES + 2)
    assert [*curve.reported] == [*range(first, 3_001, 200)]


@pytest.mark.parametrize(("skip", "every"), [(100, 10), (500, 50), (30, 20), (0, 1)])
def test_a_run_too_short_for_a_prediction_says_so_at_its_start(skip, every):
    """It went on without a word."""

    def curve(last):
        return Curve(extrapolation(skip=skip), planted, last=last, every=every)

    long = next(one for last in range(every, LAST, every) if not (one := curve(last)).said)
    enough = long.run.total_steps
    short = curve(enough - every)

    assert [*long.go(every, enough).reported] == [enough]
    assert short.go(every, enough - every).reported == {}
    (said,) = short.said
    assert f"after skip = {skip} make up 19 stretches of 10% each, of 20" in said
    assert f"lower skip, or metrics.interval = {every}" in said


def test_a_curve_that_rises_has_no_prediction():
    assert Curve(extrapolation(), lambda step: 2 + step / LAST).go(10, 5_000).reported == {}


def test_losses_that_are_not_finite_are_left_out():
    broken = Curve(extrapolation(), lambda step: math.nan if step == 2_000 else planted(step)).go(10, 4_000)

    assert broken.reported[4_000] == pytest.approx(planted(LAST), rel=0.01)


def test_a_resumed_run_reports_the_same():
    through = Curve(extrapolation(), lambda step: planted(step, 0.05)).go(10, 4_000)
    callback = extrapolation()
    Curve(callback, lambda step: planted(step, 0.05)).go(10, 2_000)
    saved = json.loads(
        json.dumps(state_entry("curve", callback)["state"])
    )  # refuses what JSON does not give back as it was
    again = extrapolation()
    again.load_state(saved, 1)

    resumed = Curve(again, lambda step: planted(step, 0.05)).go(2_010, 4_000)

    assert resumed.reported == {step: value for step, value in through.reported.items() if step > 2_000}
    assert len(json.dumps(saved)) < 5_000


def test_with_a_pipeline_the_name_is_there_from_the_first_logged_step_on():
    curve = Curve(extrapolation(interval=100), planted, pp=2).go(10, 1_500)

    assert math.isnan(curve.reported[10])
    assert math.isfinite(curve.reported[1_500])
    assert math.isnan(curve.reported[1_490])
