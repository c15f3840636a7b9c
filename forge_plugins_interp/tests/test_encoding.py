"""Encoding, against published packages, brute force, and what was planted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.neuro.encoding import Splits, correlations, encode, halves, reliabilities
from forge_plugins_interp.neuro.regression import ALPHAS, PLS, Ridge


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("features", [5, 80], ids=["primal", "dual"])
@pytest.mark.parametrize("per_target", [False, True])
def test_ridge_is_that_of_sklearn_with_leaving_one_out(features, per_target):
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = random(40, features), random(40, 3, seed=1) + random(40, features) @ random(features, 3, seed=2)

    found = Ridge(per_target=per_target).of(x)(y)

    theirs = linear_model.RidgeCV(alphas=ALPHAS, alpha_per_target=per_target).fit(x.numpy(), y.numpy())
    new = random(7, features, seed=3)
    assert np.allclose(found(new), theirs.predict(new.numpy()), atol=1e-6)


def test_ridge_with_more_features_than_stimuli_is_its_dual():
    x, y = random(30, 100), random(30, 2, seed=1)

    found = Ridge(alphas=[2.0]).of(x)(y)

    a, b = x - x.mean(0), y - y.mean(0)
    dual = a.T @ torch.linalg.solve(a @ a.T + 2.0 * torch.eye(30, dtype=torch.float64), b)
    assert torch.allclose(found.weights, dual, atol=1e-9)


@pytest.mark.parametrize("components", [1, 4])
def test_pls_is_that_of_sklearn(components):
    decomposition = pytest.importorskip("sklearn.cross_decomposition")
    x = random(50, 12)
    y = x @ random(12, 4, seed=2) + random(50, 4, seed=1)

    found = PLS(components=components).of(x)(y)

    theirs = decomposition.PLSRegression(components, scale=False, tol=1e-14, max_iter=5000).fit(x.numpy(), y.numpy())
    new = random(9, 12, seed=3)
    assert np.allclose(found(new), theirs.predict(new.numpy()), atol=1e-5)
    with pytest.raises(
        ConfigError, match="13 components are more than 50 stimuli and 12 features allow; give at most 12"
    ):
        PLS(components=13).of(x)


def test_a_planted_map_is_found_and_shuffled_stimuli_are_not():
    x = random(120, 20)
    y = x @ random(20, 6, seed=1)
    noise = 0.3 * y.std() * random(120, 8, 6, seed=2)

    found = encode(x, y[:, None] + noise, Ridge(), shuffles=19)

    assert found.score > 0.97
    assert found.low <= found.score <= found.high
    assert max(map(abs, found.null)) < 0.4
    assert abs(np.mean(found.null)) < 0.1
    assert found.p_value == pytest.approx(1 / 20)
    assert 0.9 < found.normalised <= 1.01
    unrelated = encode(random(120, 20, seed=9), y[:, None] + noise, Ridge())
    assert abs(unrelated.score) < 0.3


@pytest.mark.parametrize("number", [2, 3, 5, 6])
def test_a_ceiling_is_the_reliability_of_the_mean(number):
    """The mean of six has a noise variance of 1/6; of an odd number, no repetition is lost by halving."""
    signal = random(5000, 3)
    repetitions = signal[:, None] + random(5000, number, 3, seed=1)

    assert np.allclose(reliabilities(repetitions), 1 / (1 + 1 / number), atol=0.02)
    with pytest.raises(ConfigError, match="at least 2 repetitions"):
        next(halves(repetitions[:, :1]))


def test_residuals_of_ridge_are_those_of_leaving_each_stimulus_out():
    """Brute force: the penalty of the least error of maps that were fitted without each stimulus."""
    for features in (5, 60):
        x, y = random(30, features), random(30, 2, seed=1) + random(30, features) @ random(features, 2, seed=2)
        errors = []
        for alpha in ALPHAS:
            maps = [(one, Ridge(alphas=[alpha]).of(x[kept])(y[kept])) for one, kept in left_out(30)]
            errors.append(sum(float((y[one] - found(x[one])).square().sum()) for one, found in maps))
        best = ALPHAS[int(np.argmin(errors))]

        assert torch.allclose(Ridge().of(x)(y).weights, Ridge(alphas=[best]).of(x)(y).weights)


def left_out(n):
    return [(one, torch.arange(n) != one) for one in range(n)]


def test_pls_stops_where_nothing_covaries():
    x = random(20, 3)
    rank_one = x[:, :1] @ random(1, 4)
    assert torch.allclose(PLS(components=3).of(x)(rank_one)(x), rank_one, atol=1e-9)
    constant = torch.full((20, 4), 5.0, dtype=torch.float64)
    assert torch.equal(PLS(components=2).of(x)(constant)(x), constant)


def test_a_score_is_the_median_over_neuroids_and_the_mean_over_splits():
    """Of an even number of neuroids the median is the mean of the two in the middle."""
    x = random(60, 4)
    y = x @ random(4, 6, seed=1) + 2 * random(60, 6, seed=2)
    expected = []
    for train, test in Splits().of(60):
        predicted = Ridge().of(x[train])(y[train])(x[test]).numpy()
        each = [np.corrcoef(a, b)[0, 1] for a, b in zip(predicted.T, y[test].numpy().T, strict=True)]
        expected.append(np.median(each))

    assert encode(x, y[:, None], Ridge()).score == pytest.approx(np.mean(expected))


def test_more_splits_of_the_same_stimuli_do_not_make_an_interval_smaller():
    x = random(60, 4)
    y = x @ random(4, 6, seed=1) + 3 * random(60, 6, seed=2)
    few, many = (encode(x, y[:, None], Ridge(), splits=Splits(number=number, test=0.2)) for number in (20, 160))

    assert many.high - many.low > 0.7 * (few.high - few.low)


def test_a_neuroid_without_a_ceiling_is_left_out_of_the_normalised_score():
    x = random(80, 4)
    y = (x @ random(4, 3, seed=1))[:, None] + 0.5 * random(80, 4, 3, seed=2)
    whole = encode(x, y, Ridge())
    unreliable = torch.cat((y, torch.tensor([1.0, 1.0, -1.0, -1.0])[None, :, None] * random(80, 1, 1, seed=3)), 2)

    assert whole.ceiling_low < whole.ceiling < whole.ceiling_high
    assert encode(x, unreliable, Ridge()).normalised == pytest.approx(whole.normalised, rel=0.2)


def test_a_prediction_that_is_constant_predicts_nothing():
    a, b = random(9, 1), torch.full((9, 1), 2.5)
    assert correlations(a, b).item() == 0
    assert bool(correlations(b, a).isnan())
    with pytest.raises(ConfigError, match="none of the 2 neuroids varies in stimuli that are held out"):
        encode(random(20, 3), torch.ones(20, 1, 2), Ridge())


def test_weights_of_rows_are_repeated_rows():
    a, b = random(12, 3), random(12, 3, seed=1)
    counts = torch.tensor([[2, 0, 1, 1, 3, 0, 1, 0, 1, 1, 1, 1.0]], dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(12), counts[0].long())

    expected = [np.corrcoef(a[rows, one], b[rows, one])[0, 1] for one in range(3)]
    assert np.allclose(correlations(a, b, counts)[0], expected)


def test_no_group_is_in_training_and_test():
    groups = np.repeat(np.arange(12), 5).astype(str)
    for train, test in Splits(number=5, test=0.2).of(60, groups):
        assert not set(groups[train]) & set(groups[test])
        assert len(set(groups[test])) == 2
    with pytest.raises(ConfigError, match="all stimuli are of the group 'a'"):
        next(Splits().of(20, np.repeat("a", 20)))
    with pytest.raises(ConfigError, match="needs at least 10 stimuli, and there are 9"):
        next(Splits().of(9))


def test_few_stimuli_are_scored_on_more_than_two_of_them():
    """A tenth of 20 is two, over which every correlation is 1 or −1: noise was scored 1.0, from 1.0 to 1.0."""
    pairs = np.repeat(np.arange(10), 2)
    for train, test in [*Splits().of(20), *Splits().of(10), *Splits().of(20, pairs)]:
        assert len(test) in (5, 6)
        assert len(train) >= 5
    in_two = np.repeat(np.arange(2), 7)[:10]
    assert {len(test) for _, test in Splits().of(10, in_two)} == {3, 7}

    found = encode(random(20, 6), random(20, 1, 1, seed=1), Ridge())
    assert found.high < 1


def test_correlations_are_those_of_numpy():
    a, b = random(30, 4), random(30, 4, seed=1)
    assert correlations(a, b).tolist() == pytest.approx([np.corrcoef(a[:, i], b[:, i])[0, 1] for i in range(4)])
