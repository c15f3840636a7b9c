"""The fit of scaling laws: planted numbers are found again, and in noise the least squares of another fit."""

import math

import numpy as np
import pytest

from forge_plugins_monitor.report.power_law import fit

COMPUTE = [1e17 * 4**i for i in range(8)]


@pytest.mark.parametrize(("floor", "factor", "exponent"), [(0.0, 50.0, 0.09), (1.69, 400.0, 0.15), (0.5, 9.0, 0.05)])
def test_planted_numbers_are_found_again(floor, factor, exponent):
    law = fit(COMPUTE, [floor + factor * c**-exponent for c in COMPUTE], with_floor=True)

    assert law.floor == pytest.approx(floor, abs=1e-4)
    assert law.exponent == pytest.approx(exponent, abs=1e-5)
    assert law.factor == pytest.approx(factor, rel=1e-5 * math.log(COMPUTE[-1]))
    assert law.r_squared > 0.999999


def test_of_three_sizes_it_is_the_line_through_the_logarithms_with_numpy_as_judge():
    compute, loss = [1e17, 3e17, 1e18], [4.0, 3.2, 2.9]

    law = fit(compute, loss, with_floor=False)

    slope, height = np.polyfit(np.log(compute), np.log(loss), 1)
    assert (law.floor, law.exponent, law.factor) == (0.0, pytest.approx(-slope), pytest.approx(math.exp(height)))
    assert law.r_squared == pytest.approx(np.corrcoef(np.log(compute), np.log(loss))[0, 1] ** 2)


@pytest.mark.parametrize("seed", range(4))
def test_in_noise_the_floor_is_that_of_the_least_squares_of_logarithms(seed):
    noise = np.random.default_rng(seed).normal(0, 0.03, len(COMPUTE))
    loss = (1.2 + 3e5 * np.array(COMPUTE) ** -0.3) * np.exp(noise)

    def misses(floor):
        slope, height = np.polyfit(np.log(COMPUTE), np.log(loss - floor), 1)
        return np.square(np.log(floor + np.exp(height + slope * np.log(COMPUTE))) - np.log(loss)).sum()

    law = fit(COMPUTE, loss.tolist(), with_floor=True)

    others = [*(np.arange(400) * loss.min() / 400), law.floor - 1e-4 * loss.min(), law.floor + 1e-4 * loss.min()]
    assert misses(law.floor) <= min(map(misses, [one for one in others if 0 <= one < loss.min()]))
