"""The permutation behind every shuffled stream."""

import itertools
import math

import numpy as np
import pytest

from forge_core.data.permutation import permute


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_every_small_domain_is_permuted(seed):
    for n in [*range(1, 300), 1000, 4095, 4096, 4097, 65_537]:
        result = permute(np.arange(n), n, seed, epoch=seed % 3)

        assert result.dtype == np.int64
        np.testing.assert_array_equal(np.sort(result), np.arange(n))


def test_any_part_can_be_asked_for_in_any_shape_and_order():
    n = 10_000
    whole = permute(np.arange(n), n, seed=3, epoch=4)
    chosen = np.random.default_rng(0).integers(0, n, (7, 11))

    np.testing.assert_array_equal(permute(chosen, n, seed=3, epoch=4), whole[chosen])
    assert permute(np.empty(0, np.int64), n, seed=3, epoch=4).size == 0


def test_the_largest_domain_needs_no_table_and_has_no_collisions():
    n = 2**62
    ends = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])

    result = permute(ends, n, seed=1, epoch=0)

    assert np.unique(result).size == ends.size
    assert result.min() >= 0
    assert result.max() < n


def test_seeds_and_epochs_give_unrelated_orders():
    n = 5000
    orders = [permute(np.arange(n), n, seed, epoch) for seed, epoch in itertools.product(range(3), range(3))]

    for one, other in itertools.combinations(orders, 2):
        agreeing = np.count_nonzero(one == other)  # Poisson with mean 1 for independent permutations
        assert agreeing < 8
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)


def test_the_order_never_changes_between_versions():
    np.testing.assert_array_equal(permute(np.arange(10), 10, seed=42, epoch=0), PINNED_10)
    np.testing.assert_array_equal(permute(np.arange(5), 10**12, seed=42, epoch=7), PINNED_TRILLION)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_orders_of_few_samples_are_about_equally_frequent(n):
    draws = 4000
    seen = np.array([permute(np.arange(n), n, seed, 0) for seed in range(draws)])
    _, counts = np.unique(seen, axis=0, return_counts=True)

    assert len(counts) == math.factorial(n)
    assert chi_square_deviation(counts, draws / math.factorial(n)) < 4


@pytest.mark.parametrize("n", [7, 16, 100, 257])
def test_each_sample_comes_everywhere_and_neighbours_are_parted(n):
    draws = 3000
    seen = np.array([permute(np.arange(n), n, seed, 1) for seed in range(draws)])

    places = np.stack([np.bincount(seen[:, i], minlength=n) for i in range(n)])
    distances = np.bincount(((seen[:, 1:] - seen[:, :-1]) % n).ravel(), minlength=n)[1:]

    assert chi_square_deviation(places, draws / n, lost=2 * n - 1) < 4
    assert chi_square_deviation(distances, distances.sum() / (n - 1)) < 4


def test_a_long_order_has_no_drift():
    n = 1_000_000
    order = permute(np.arange(100_000), n, seed=5, epoch=0)
    eighths = np.stack([np.bincount(part * 64 // n, minlength=64) for part in np.split(order, 8)])

    assert chi_square_deviation(eighths, 12_500 / 64, lost=8) < 4


@pytest.mark.parametrize(
    ("indices", "n", "message"),
    [([0], 0, "n must be between"), ([0], 2**62 + 1, "n must be"), ([5], 5, "0 and n - 1 = 4"), ([-1], 5, "got -1")],
)
def test_what_is_outside_the_domain_is_refused(indices, n, message):
    with pytest.raises(ValueError, match=message):
        permute(np.array(indices), n, seed=0, epoch=0)


def chi_square_deviation(counts, expected, lost=1):
    """How many standard deviations the statistic is above its mean, for ``counts.size − lost`` degrees of freedom."""
    freedom = counts.size - lost
    statistic = ((counts - expected) ** 2 / expected).sum()
    return (statistic - freedom) / math.sqrt(2 * freedom)


PINNED_10 = [8, 0, 4, 2, 1, 5, 7, 9, 3, 6]
PINNED_TRILLION = [225692949968, 190046772759, 158059093300, 970569128870, 929397596519]
