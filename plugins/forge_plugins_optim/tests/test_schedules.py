"""Every schedule against torch's, Hugging Face's or the published formula, computed apart in float64."""

import inspect
import math

import numpy as np
import pytest
import torch
from transformers import get_inverse_sqrt_schedule

from forge_core.errors import ConfigError
from forge_plugins_optim.constant import constant
from forge_plugins_optim.decay import cosine, linear, polynomial, rex
from forge_plugins_optim.inverse_sqrt import inverse_sqrt
from forge_plugins_optim.none import none
from forge_plugins_optim.piecewise import piecewise
from forge_plugins_optim.schedule_config import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    NoneConfig,
    PiecewiseConfig,
    PolynomialConfig,
    RexConfig,
    WSDConfig,
)
from forge_plugins_optim.wsd import wsd

STEPS, WARM_UP = 110, 10
EVERY = {
    constant: ConstantConfig,
    cosine: CosineConfig,
    linear: LinearConfig,
    polynomial: PolynomialConfig,
    rex: RexConfig,
    inverse_sqrt: InverseSqrtConfig,
    wsd: WSDConfig,
    piecewise: lambda **keys: PiecewiseConfig(boundaries=(0.5,), ratios=(1.0, 0.5), **keys),
}
each = pytest.mark.parametrize("factory", EVERY, ids=lambda factory: factory.__name__)


def made(factory, *, total_steps=STEPS, tokens_per_step=1000, **keys):
    config = {**EVERY, piecewise: PiecewiseConfig}[factory](**keys)
    return factory(config, total_steps=total_steps, tokens_per_step=tokens_per_step)


def curve(schedule, last=STEPS) -> np.ndarray:
    return np.array([schedule(step) for step in range(1, last + 1)])


def torch_curve(make_scheduler, n: int) -> np.ndarray:
    """The learning rates of ``n`` updates of a torch scheduler from the base 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(n):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


def after_warm_up(n=STEPS - WARM_UP) -> np.ndarray:
    """The part of the decay that is done, from the first update after the warm-up to the last one."""
    return np.arange(1, n + 1, dtype=np.float64) / n


@each
@pytest.mark.parametrize(
    "keys",
    [{"warmup_steps": 4}, {"warmup_tokens": 3001.0}, {"warmup_fraction": 0.036}],
    ids=lambda keys: next(iter(keys)),
)
def test_warm_up_is_linear_and_never_zero(factory, keys) -> None:
    schedule = factory(EVERY[factory](**keys), total_steps=100, tokens_per_step=1000)

    assert [schedule(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@each
def test_the_first_update_has_all_of_it_without_a_warm_up(factory) -> None:
    schedule = factory(EVERY[factory](), total_steps=1000, tokens_per_step=1)

    assert schedule(1) == pytest.approx(1.0, abs=2e-3)


def test_constant_and_none_stay() -> None:
    assert set(curve(made(constant))) == {1.0}
    assert set(curve(none(NoneConfig(), total_steps=10))) == {1.0}


def test_cosine_equals_that_of_torch() -> None:
    found = curve(made(cosine, warmup_steps=WARM_UP, min_ratio=0.2))

    wanted = torch_curve(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100, eta_min=0.2), 101)
    np.testing.assert_allclose(found[WARM_UP - 1 :], wanted, rtol=1e-12)


def test_linear_equals_that_of_torch() -> None:
    found = curve(made(linear, warmup_steps=WARM_UP, min_ratio=0.2))

    wanted = torch_curve(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=100), 101)
    np.testing.assert_allclose(found[WARM_UP - 1 :], wanted, rtol=1e-12)


def test_polynomial_equals_that_of_torch_and_has_a_floor() -> None:
    wanted = torch_curve(lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 100, power=1.7), 101)

    found = curve(made(polynomial, warmup_steps=WARM_UP, min_ratio=0.0, power=1.7))
    floored = curve(made(polynomial, warmup_steps=WARM_UP, min_ratio=0.3, power=1.7))

    np.testing.assert_allclose(found[WARM_UP - 1 :], wanted, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(floored[WARM_UP - 1 :], np.maximum(0.3, wanted), rtol=1e-9)


def test_rex_follows_the_published_formula() -> None:
    left = 1 - after_warm_up()

    found = curve(made(rex, warmup_steps=WARM_UP))
    floored = curve(made(rex, warmup_steps=WARM_UP, min_ratio=0.3))

    np.testing.assert_allclose(found[WARM_UP:], left / (0.5 + 0.5 * left), rtol=1e-12)
    np.testing.assert_allclose(floored[WARM_UP:], np.maximum(0.3, left / (0.5 + 0.5 * left)), rtol=1e-12)
    assert made(rex, total_steps=100)(50) == pytest.approx(2 / 3), "a power of what is left would have 1/2"


@pytest.mark.parametrize("keys", [{"warmup_steps": 10}, {"warmup_steps": 10, "timescale": 40}, {"timescale": 40}])
def test_inverse_sqrt_equals_that_of_hugging_face(keys) -> None:
    found = curve(made(inverse_sqrt, **keys))

    warmup = keys.get("warmup_steps", 0)
    wanted = torch_curve(lambda o: get_inverse_sqrt_schedule(o, warmup, keys.get("timescale")), STEPS + 1)
    np.testing.assert_allclose(found, wanted[1:], rtol=1e-12)  # theirs counts from 0


def test_inverse_sqrt_is_that_of_the_paper_up_to_a_factor() -> None:
    step = np.arange(1, STEPS + 1, dtype=np.float64)
    published = np.minimum(step**-0.5, step * WARM_UP**-1.5)

    np.testing.assert_allclose(curve(made(inverse_sqrt, warmup_steps=WARM_UP)), published * WARM_UP**0.5, rtol=1e-12)


SHAPES = {
    "1-sqrt": lambda p: 1 - np.sqrt(p),
    "linear": lambda p: 1 - p,
    "cosine": lambda p: 0.5 * (1 + np.cos(np.pi * p)),
    "sqrt-of-rest": lambda p: np.sqrt(1 - p),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [{"cooldown_steps": 30}, {"cooldown_fraction": 30 / STEPS}])
def test_wsd_is_stable_and_then_falls_as_its_shape_says(shape, length) -> None:
    found = curve(made(wsd, warmup_steps=WARM_UP, min_ratio=0.05, shape=shape, **length))

    assert set(found[WARM_UP - 1 : 80]) == {1.0}
    np.testing.assert_allclose(found[80:], 0.05 + 0.95 * SHAPES[shape](np.arange(1, 31) / 30), rtol=1e-12)


def test_wsd_cools_down_over_the_last_fifth_unless_told_otherwise() -> None:
    found = curve(made(wsd, total_steps=100), 100)

    assert (np.flatnonzero(found < 1)[0] + 1, found[-1]) == (81, 0.0)


def test_piecewise_equals_that_of_torch() -> None:
    wanted = torch_curve(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [40, 90], gamma=0.25), STEPS)

    for boundaries in ((40, 90), (40 / STEPS, 90 / STEPS)):
        found = curve(made(piecewise, boundaries=boundaries, ratios=(1.0, 0.25, 0.0625)))
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_piecewise_warms_up_to_its_first_ratio() -> None:
    schedule = made(piecewise, boundaries=(50,), ratios=(0.5, 0.1), warmup_steps=10)

    assert [schedule(step) for step in (1, 10, 50, 51)] == [0.05, 0.5, 0.5, 0.1]


@pytest.mark.parametrize("factory", [cosine, linear, polynomial, rex], ids=lambda factory: factory.__name__)
def test_a_decay_ends_at_its_floor_and_stays_there(factory) -> None:
    schedule = made(factory, min_ratio=0.1, total_steps=50)

    assert [schedule(step) for step in (50, 51, 1000)] == pytest.approx([0.1, 0.1, 0.1])
    assert schedule(30) > 0.1


@pytest.mark.parametrize("factory", [cosine, linear, polynomial, rex], ids=lambda factory: factory.__name__)
def test_decay_can_be_shorter_or_longer_than_the_run(factory) -> None:
    short = made(factory, decay_steps=10, min_ratio=0.0, total_steps=100)
    long = made(factory, decay_steps=200, min_ratio=0.0, total_steps=100)
    whole = made(factory, min_ratio=0.0, total_steps=200)

    assert short(10) == short(100) == 0.0
    assert long(100) == whole(100) > 0


@each
def test_a_run_of_one_step_has_a_schedule(factory) -> None:
    if factory is piecewise:
        with pytest.raises(ConfigError, match=r"scheduler\.boundaries"):  # it has two parts
            factory(EVERY[factory](), total_steps=1, tokens_per_step=1)
        return
    assert math.isfinite(factory(EVERY[factory](), total_steps=1, tokens_per_step=1)(1))


def test_a_warm_up_in_tokens_lasts_until_they_are_seen() -> None:
    exact, more = made(constant, warmup_tokens=3000), made(constant, warmup_tokens=3001)

    assert (exact(3), more(3), more(4)) == (1.0, 0.75, 1.0)


@pytest.mark.parametrize(
    ("factory", "keys", "sentence"),
    [
        (cosine, {"warmup_steps": 10}, r"warmup_steps must be below train\.steps = 10, .*; got 10"),
        (constant, {"warmup_steps": 11}, r"warmup_steps must not be above train\.steps = 10; got 11"),
        (linear, {"warmup_fraction": 1.0}, r"warmup_fraction must be below train\.steps = 10.*; got 1, which lasts 10"),
        (
            rex,
            {"warmup_tokens": 10_000},
            r"warmup_tokens must be below train\.steps = 10.*; got 10000, which lasts 10 steps of 1000 tokens",
        ),
        (wsd, {"warmup_tokens": 10_001}, r"warmup_tokens must not be above train\.steps = 10; got 10001, .* 11 steps"),
        (
            wsd,
            {"warmup_steps": 6, "cooldown_steps": 5},
            "cooldown_steps 5 steps of cooldown after 6 of warm-up are more",
        ),
        (wsd, {"warmup_steps": 9}, "cooldown_fraction 2 steps of cooldown after 9 of warm-up are more"),
        (
            piecewise,
            {"boundaries": (5, 10), "ratios": (1, 1, 1)},
            r"boundaries\[1\] must be before the last step, .* 10",
        ),
        (piecewise, {"boundaries": (0.01,), "ratios": (1, 1)}, r"boundaries\[0\] leaves no step to its part"),
        (piecewise, {"boundaries": (0.5, 0.51), "ratios": (1, 1, 1)}, r"boundaries\[1\] leaves no step to its part"),
    ],
)
def test_what_does_not_fit_into_the_run_is_refused(factory, keys, sentence) -> None:
    with pytest.raises(ConfigError, match=r"^scheduler\." + sentence):
        made(factory, total_steps=10, **keys)


def test_every_schedule_takes_what_the_contract_gives() -> None:
    for factory in EVERY:
        assert [*inspect.signature(factory).parameters] == ["config", "total_steps", "tokens_per_step"]
