import math

import pytest

from forge_core.errors import ConfigError
from forge_plugins_optim.config import ConstantConfig, CosineConfig
from forge_plugins_optim.constant import constant
from forge_plugins_optim.cosine import cosine


def test_warm_up_is_linear_and_never_zero() -> None:
    for schedule in (
        cosine(CosineConfig(warmup_steps=4), total_steps=100),
        constant(ConstantConfig(warmup_steps=4), total_steps=100),
    ):
        assert [schedule(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays() -> None:
    schedule = constant(ConstantConfig(), total_steps=10)

    assert {schedule(step) for step in range(1, 20)} == {1.0}


def test_cosine_follows_its_formula() -> None:
    schedule = cosine(CosineConfig(warmup_steps=10, min_ratio=0.2), total_steps=110)

    for step in range(11, 111):
        expected = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 100))
        assert schedule(step) == pytest.approx(expected, rel=1e-14)
    assert schedule(60) == pytest.approx(0.6, rel=1e-12)


def test_cosine_ends_at_its_floor_and_stays_there() -> None:
    schedule = cosine(CosineConfig(min_ratio=0.1), total_steps=50)

    assert [schedule(step) for step in (50, 51, 1000)] == pytest.approx([0.1, 0.1, 0.1])
    assert schedule(49) > 0.1


def test_decay_can_be_shorter_or_longer_than_the_run() -> None:
    short = cosine(CosineConfig(decay_steps=10, min_ratio=0.0), total_steps=100)
    long = cosine(CosineConfig(decay_steps=200, min_ratio=0.0), total_steps=100)

    assert short(10) == short(100) == 0.0
    assert long(100) == pytest.approx(0.5)


def test_a_run_of_one_step_has_a_schedule() -> None:
    assert cosine(CosineConfig(), total_steps=1)(1) == pytest.approx(0.1)
    assert constant(ConstantConfig(warmup_steps=1), total_steps=1)(1) == 1.0


def test_a_warm_up_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.warmup_steps must be below train\.steps = 10, .*got 10"):
        cosine(CosineConfig(warmup_steps=10), total_steps=10)
    with pytest.raises(ConfigError, match=r"scheduler\.warmup_steps must not be above train\.steps = 10, got 11"):
        constant(ConstantConfig(warmup_steps=11), total_steps=10)
