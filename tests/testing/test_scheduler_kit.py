"""The scheduler kit passes a schedule that keeps the contract, and has a sentence for each way to break it."""

import itertools

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_testing.scheduler import SchedulerConformance


class TestLinear(SchedulerConformance):
    def make(self, *, total_steps):
        return lambda step: max(0.0, 1 - (step - 1) / total_steps)


class TestRefusesShortRuns(SchedulerConformance):
    def make(self, *, total_steps):
        if total_steps < 10:
            raise ConfigError("warmup_steps is longer than the run")
        return lambda step: min(1.0, step / 10)


def counting(total_steps):
    calls = itertools.count(1)
    return lambda step: 1 / next(calls)


def made_differently(total_steps, made=itertools.count(1)):  # noqa: B008 – shared on purpose
    base = next(made)
    return lambda step: base * step


FAULTS = [
    (
        lambda n: lambda step: 1 - step / n,
        "test_gives_a_finite_multiplier_at_every_step",
        "step 101 of 100 is negative",
    ),
    (
        lambda n: lambda step: step if step < n else float("nan"),
        "test_gives_a_finite_multiplier_at_every_step",
        "step 100 of 100 is nan",
    ),
    (
        lambda n: lambda step: np.ones(1),
        "test_gives_a_finite_multiplier_at_every_step",
        "the multiplier of step 1 must be a float, got ndarray",
    ),
    (
        lambda n: lambda step: step <= n,
        "test_gives_a_finite_multiplier_at_every_step",
        "the multiplier of step 1 must be a float, got bool",
    ),
    (counting, "test_depends_on_the_step_only", "changes with the order of calls"),
    (made_differently, "test_depends_on_the_step_only", "a run that resumes at step"),
    (lambda n: 1 / (n - 1), "test_a_run_of_one_step_works_or_is_refused", "total_steps=1 raises ZeroDivisionError"),
    (
        lambda n: lambda step: step / (n - 1),
        "test_a_run_of_one_step_works_or_is_refused",
        "the only step of a run of one step raises ZeroDivisionError",
    ),
    (
        lambda n: lambda step: float("inf") if n == 1 else 1.0,
        "test_a_run_of_one_step_works_or_is_refused",
        "the only step of a run of one step is inf",
    ),
]


@pytest.mark.parametrize(("factory", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(factory, check, sentence):
    class Case(SchedulerConformance):
        def make(self, *, total_steps):
            return factory(total_steps)

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)()


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(SchedulerConformance) if name.startswith("test_")}

    assert {check for _, check, _ in FAULTS} == checks
