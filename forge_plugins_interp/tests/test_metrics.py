"""Comparisons of representations, against formulas by brute force, invariances, and published packages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics import cka
from forge_plugins_interp.metrics.cca import canonical_correlations, mean_cca, pwcca, svcca
from forge_plugins_interp.metrics.cka import LinearCKA, hsic_0, hsic_1, linear_cka, rbf_cka
from forge_plugins_interp.metrics.components import Rsa
from forge_plugins_interp.metrics.config import RsaConfig
from forge_plugins_interp.metrics.procrustes import angular_procrustes, procrustes
from forge_plugins_interp.metrics.rsa import (
    bootstrap,
    compare,
    crossnobis,
    noise_ceiling,
    noise_precision,
    permutations,
    rdm,
    rsa,
    scaled_positions,
    square,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = random(60, 5), random(60, 5) @ random(5, 8, seed=3) + 0.5 * random(60, 8, seed=2)
ROTATION = torch.linalg.qr(random(5, 5, seed=5))[0]
MAP = random(5, 5, seed=6)
METRICS = {
    "debiased CKA": linear_cka,
    "biased CKA": lambda x, y: linear_cka(x, y, debiased=False),
    "RBF CKA": rbf_cka,
    "mean CCA": mean_cca,
    "SVCCA": svcca,
    "Procrustes": procrustes,
    "angle": angular_procrustes,
    "RSA": lambda x, y: rsa(x, y, kind="euclidean"),
}
UNDER_ANY_MAP = ("mean CCA", "SVCCA")  # where all directions are kept


def centring(n):
    return torch.eye(n, dtype=torch.float64) - 1 / n


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:.*stimuli are few")
def test_rotations_scales_and_translations_change_nothing(name):
    metric = METRICS[name]

    assert metric(3 * X @ ROTATION + 7, Y) == pytest.approx(metric(X, Y), abs=1e-7)
    assert metric(X, X @ ROTATION) == pytest.approx(0 if name in ("Procrustes", "angle") else 1, abs=1e-6)
    changed = metric(X @ MAP, Y) != pytest.approx(metric(X, Y), abs=1e-4)
    assert changed is (name not in UNDER_ANY_MAP)


@pytest.mark.parametrize("features", [8, 200], ids=["features", "kernels"])
def test_cka_is_its_formula(features):
    y = random(60, features, seed=4)
    k, other, h = X @ X.T, y @ y.T, centring(60)
    trace = torch.trace(k @ h @ other @ h)
    assert float(hsic_0(k, other)) == pytest.approx(float(trace) / 59**2)
    biased = trace / (torch.trace(k @ h @ k @ h) * torch.trace(other @ h @ other @ h)).sqrt()
    assert linear_cka(X, y, debiased=False) == pytest.approx(float(biased))

    def unbiased(a, b):
        a, b = (one - one.diagonal().diag() for one in (a, b))
        n, ones = len(a), torch.ones(len(a), dtype=torch.float64)
        last = ones @ a @ b @ ones * 2 / (n - 2)
        return (torch.trace(a @ b) + (ones @ a @ ones) * (ones @ b @ ones) / ((n - 1) * (n - 2)) - last) / (n * (n - 3))

    assert float(hsic_1(k, other)) == pytest.approx(float(unbiased(k, other)))
    expected = unbiased(k, other) / (unbiased(k, k) * unbiased(other, other)).sqrt()
    assert linear_cka(X, y) == pytest.approx(float(expected))


def test_debiased_cka_of_independent_noise_is_near_zero_and_biased_is_not():
    x, y = random(200, 2000), random(200, 2000, seed=1)

    assert linear_cka(x, y, debiased=False) > 0.85
    assert abs(linear_cka(x, y)) < 0.05


def test_a_wide_kernel_is_the_linear_one():
    assert rbf_cka(X, Y, fraction=100.0, debiased=False) == pytest.approx(linear_cka(X, Y, debiased=False), abs=1e-3)


def test_the_width_of_a_kernel_is_the_median_of_an_even_number_of_pairs():
    x, y = X[:4], Y[:4]  # 6 pairs
    kernels = []
    for one in (x, y):
        squares = np.square(one.numpy()[:, None] - one.numpy()[None]).sum(2)
        median = np.median(squares[np.triu_indices(4, 1)])
        kernels.append(torch.from_numpy(np.exp(-squares / (2 * median))))
    k, other = kernels

    expected = hsic_0(k, other) / (hsic_0(k, k) * hsic_0(other, other)).sqrt()
    assert rbf_cka(x, y, debiased=False) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:.*stimuli are few")
def test_stimuli_that_are_all_the_same_are_like_nothing(name):
    constant = torch.full((60, 5), 0.1, dtype=torch.float64)  # whose mean over features is not 0.1

    with pytest.warns(UserWarning, match="are the same"):
        assert math.isnan(METRICS[name](constant, Y))
    with pytest.warns(UserWarning, match="are the same"):
        assert math.isnan(METRICS[name](X, constant))


def test_a_kernel_without_a_width_is_nan_with_a_warning():
    few = X.clone()
    few[:50] = few[0]

    with pytest.warns(UserWarning, match="not similar to itself: its stimuli are the same"):
        assert math.isnan(rbf_cka(few, Y))


def test_dissimilarities_that_are_all_the_same_are_like_nothing():
    metric = Rsa(RsaConfig())

    with pytest.warns(UserWarning, match="all dissimilarities of a representation are the same"):
        assert math.isnan(metric.compare(torch.eye(60, dtype=torch.float64), Y))


def test_stimuli_that_are_the_same_are_ties():
    twice = X.repeat_interleave(2, 0)[torch.randperm(120, generator=torch.Generator().manual_seed(0))]
    whole = square(rdm(twice), 120)

    same = (twice[:, None] == twice[None]).all(2)
    assert bool((whole[same] == 0).all())
    rows = [whole[row][:, None] == whole[row] for row in range(120)]
    assert all(bool(tied[same].all()) for tied in rows)


def test_batches_estimate_the_whole():
    x, y = random(4000, 6), random(4000, 6) + random(4000, 6, seed=1)
    estimate = LinearCKA()
    for a, b in zip(x.split(200), y.split(200), strict=True):
        estimate.update([a], [b])

    assert float(estimate.result()) == pytest.approx(linear_cka(x, y), abs=5e-3)


@pytest.mark.parametrize("widths", [(3, 5, 4), (80, 90, 70)], ids=["features", "stimuli"])
@pytest.mark.parametrize("debiased", [True, False], ids=["debiased", "biased"])
@pytest.mark.parametrize("block", [2**28, 1000])
def test_a_matrix_of_cka_has_each_pair(monkeypatch, widths, debiased, block):
    monkeypatch.setattr(cka, "_BLOCK_BYTES", block)
    xs = [random(40, width, seed=width) for width in widths]
    ys = [random(40, width, seed=7) + xs[0].mean(1, keepdim=True) for width in (6, 60)]

    for others in (None, ys):
        estimate = LinearCKA(debiased=debiased)
        estimate.update(xs, others)
        expected = [[linear_cka(x, y, debiased=debiased) for y in others or xs] for x in xs]
        assert torch.allclose(estimate.result(), torch.tensor(expected, dtype=torch.float64), atol=1e-10)


def test_a_negative_self_similarity_is_nan_with_a_warning():
    x = torch.eye(4)
    with pytest.warns(UserWarning, match="not similar to itself"):
        assert math.isnan(linear_cka(x, random(4, 3)))


@pytest.mark.filterwarnings("ignore:.*stimuli are few")
def test_canonical_correlations_are_those_of_the_eigenvalue_problem():
    x, y = (one - one.mean(0) for one in (X, Y))
    xx, yy, xy = x.T @ x, y.T @ y, x.T @ y
    squares = torch.linalg.eigvals(torch.linalg.solve(xx, xy) @ torch.linalg.solve(yy, xy.T)).real

    assert torch.allclose(canonical_correlations(X, Y), squares.sort(descending=True).values.sqrt())


@pytest.mark.filterwarnings("ignore:.*stimuli are few")
def test_pwcca_weighs_correlations_by_what_they_explain():
    x = X - X.mean(0)
    left = torch.linalg.svd(x, full_matrices=False)[0]
    other = torch.linalg.svd(Y - Y.mean(0), full_matrices=False)[0]
    u, correlations, _ = torch.linalg.svd(left.T @ other, full_matrices=False)
    directions = left @ u
    weights = torch.stack([sum((direction @ column).abs() for column in x.T) for direction in directions.T])

    assert pwcca(X, Y) == pytest.approx(float((weights * correlations).sum() / weights.sum()))
    assert pwcca(4 * X + 1, Y @ random(8, 8, seed=9)) == pytest.approx(pwcca(X, Y))
    assert pwcca(X, Y) != pytest.approx(pwcca(Y, X), abs=1e-4)


def test_svcca_keeps_the_direction_that_crosses_the_threshold():
    u = torch.linalg.qr(random(50, 4) - random(50, 4).mean(0))[0]
    x = u * torch.tensor([10.0, 3, 1, 0.1], dtype=torch.float64)
    from forge_plugins_interp.metrics.cca import _leading

    x = x - x.mean(0)
    assert _leading(x, 0.99, "variance").shape[1] == 2
    assert _leading(x, 0.99, "sum").shape[1] == 3


@pytest.mark.parametrize("kind", ["correlation", "cosine", "euclidean", "sqeuclidean"])
def test_dissimilarities_are_those_of_scipy(kind):
    distance = pytest.importorskip("scipy.spatial.distance")

    assert np.allclose(rdm(X, kind).numpy(), distance.pdist(X.numpy(), kind))


@pytest.mark.parametrize("by", ["spearman", "pearson"])
def test_correlations_of_dissimilarities_are_those_of_scipy(by):
    stats = pytest.importorskip("scipy.stats")
    a, b = rdm(X).round(decimals=1), rdm(Y)  # with ties
    expected = getattr(stats, f"{by}r")(a.numpy(), b.numpy()).statistic

    assert compare(a, b, by) == pytest.approx(expected)


def test_tau_a_counts_pairs():
    a, b = torch.tensor([1.0, 2, 3, 3]), torch.tensor([1.0, 3, 2, 4])

    assert compare(a, b, "kendall") == pytest.approx((4 - 1) / 6)
    for m in (2, 37, 500):
        a, b = random(m).round(decimals=1), (random(m) + random(m, seed=1)).round(decimals=1)  # with ties
        signs = ((a[:, None] - a).sign() * (b[:, None] - b).sign()).sum()
        assert compare(a, b, "kendall") == pytest.approx(float(signs) / (m * (m - 1)))


def test_a_noise_ceiling_has_its_bounds():
    truth = random(100)
    rdms = torch.stack([truth + 0.5 * random(100, seed=seed) for seed in range(1, 7)])
    lower, upper = noise_ceiling(rdms, "pearson")

    assert lower < upper < 1
    assert lower < sum(compare(truth, one, "pearson") for one in rdms) / 6 < upper + 0.05


@pytest.mark.parametrize("by", ["pearson", "spearman", "kendall", "cosine"])
def test_no_model_is_above_a_noise_ceiling_of_subjects_of_any_scale(by):
    truth = random(45).abs()
    rdms = torch.stack([truth + 0.5 * random(45, seed=seed).abs() for seed in range(1, 5)])
    upper = noise_ceiling(rdms, by)[1]
    unit = torch.tensor([[1.0], [2.0], [3.0], [100.0]], dtype=torch.float64)

    assert np.allclose(noise_ceiling(unit * rdms, by), noise_ceiling(rdms, by))
    models = [truth, *rdms, *(random(4, seed=seed).abs() @ rdms for seed in range(20, 40))]
    assert all(sum(compare(model, one, by) for one in rdms) / 4 < upper + 0.003 for model in models)
    if by in ("pearson", "cosine"):  # the mean of RDMs of one norm is the nearest there is
        assert all(sum(compare(model, one, by) for one in rdms) / 4 < upper + 1e-9 for model in models)


def test_a_bootstrap_of_an_rdm_leaves_out_pairs_of_a_stimulus_with_itself():
    """Against the same draws by hand; their zeros on both sides would make unrelated RDMs alike."""
    x, y = random(12, 40), random(12, 40, seed=1)
    found = bootstrap(rdm(x), rdm(y)[None], "pearson", samples=5)
    generator, expected = torch.Generator().manual_seed(0), []
    for _ in range(5):
        drawn = torch.randint(12, (12,), generator=generator)
        torch.randint(1, (1,), generator=generator)
        pairs = [(a, b) for i, a in enumerate(drawn.tolist()) for b in drawn[i + 1 :].tolist() if a != b]
        sides = [torch.stack([square(rdm(one), 12)[pair] for pair in pairs]) for one in (x, y)]
        expected.append(np.corrcoef(*sides)[0, 1])

    assert np.allclose(found, expected)
    assert abs(bootstrap(rdm(x), rdm(y)[None], samples=100).mean()) < 0.2


def test_the_spread_of_a_bootstrap_is_that_of_new_subjects():
    truth = rdm(random(20, 10))
    subjects = torch.stack([truth + 0.2 * random(190, seed=seed) for seed in range(30)])
    draws = bootstrap(truth, subjects, "pearson", samples=200)
    each = [compare(truth, one, "pearson") for one in subjects]

    assert draws.mean() == pytest.approx(np.mean(each), abs=0.05)
    assert draws.std() > np.std(each) / 30**0.5  # stimuli vary, too


def test_permuted_labels_are_a_null():
    x = random(20, 10)
    subjects = torch.stack([rdm(x + 0.5 * random(20, 10, seed=seed)) for seed in range(3)])
    null = permutations(rdm(x), subjects, samples=200)

    assert abs(null.mean()) < 0.03
    assert null.max() < sum(compare(rdm(x), one) for one in subjects) / 3
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    expected = sum(compare(rdm(x[order]), one) for one in subjects) / 3
    assert float(null[0]) == pytest.approx(expected)


def test_crossnobis_distances_are_the_formula_and_unbiased():
    values, weights = random(4, 5, 3), random(3, 3, seed=1)
    precision = weights @ weights.T
    expected = []
    for i in range(5):
        for j in range(i + 1, 5):
            d = values[:, i] - values[:, j]
            pairs = [d[a] @ precision @ d[b] for a in range(4) for b in range(4) if a != b]
            expected.append(torch.stack(pairs).mean() / 3)
    assert torch.allclose(crossnobis(values, precision), torch.stack(expected))

    noise = random(6, 40, 50)
    assert abs(crossnobis(noise).mean()) < 0.05
    assert rdm(noise.mean(0), "sqeuclidean").mean() / 50 > 0.3


def test_the_precision_of_noise_is_that_of_scikit_learn():
    covariance = pytest.importorskip("sklearn.covariance")
    values = random(2, 30, 8) @ random(8, 8, seed=1) + random(30, 8, seed=2)
    residuals = (values - values.mean(0)).flatten(0, 1).numpy()
    expected = covariance.LedoitWolf(assume_centered=True).fit(residuals).covariance_ * 2

    assert np.allclose(noise_precision(values).inverse(), expected)
    assert bool(noise_precision(random(2, 4, 50)).isfinite().all())


def test_scaled_positions_have_the_distances_of_a_plane():
    positions = scaled_positions(rdm(random(9, 2), "euclidean"))

    assert torch.allclose(rdm(positions, "euclidean"), rdm(random(9, 2), "euclidean"))


def test_a_matrix_of_dissimilarities_is_drawn():
    from forge_plugins_interp.figures.dissimilarity import dissimilarity_figure

    figure = dissimilarity_figure(rdm(X[:8]), [f"s{one}" for one in range(8)])

    image = figure.axes[0].images[0].get_array()
    assert image.max() == 1
    assert np.allclose(image, image.T)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_cka(X[:3], Y[:3]), "there are 3 stimuli, and this needs at least 4"),
        (lambda: linear_cka(X, Y[:50]), "the first has 60 stimuli, and the second 50"),
        (lambda: linear_cka(X, Y.masked_fill(Y > 2, float("nan"))), "the second: stimulus .* not finite in feature"),
        (lambda: mean_cca(X[:8], Y[:8]), "more stimuli than features; there are 8, and 8"),
        (lambda: rsa(torch.ones(5, 3), X[:5]), "stimulus 0 has the same value in all features"),
        (lambda: rsa(X, Y[:, :1]), "correlated over features, and a representation, recordings or a subject has one"),
        (lambda: rdm(torch.full((30, 7), 0.1, dtype=torch.float64)), "stimulus 0 has the same value in all features"),
        (lambda: crossnobis(torch.ones(1, 6, 2)), "at least 2 repetitions of 3 stimuli, and there are 1 of 6"),
        (lambda: noise_ceiling(torch.ones(1, 6)), "at least 2 subjects, got 1"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_few_stimuli_for_cca_are_told():
    with pytest.warns(UserWarning, match="60 stimuli are few for 8 features"):
        mean_cca(X, Y)
