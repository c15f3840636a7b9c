"""CKA of features that are a sample (Chun et al. 2025), against its formula, the authors' sums, and a population."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.cka import LinearCKA, hsic_1, linear_cka


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(x):
    """The mean of HSIC over pairs of different features."""
    kernels = [torch.outer(one, one) for one in x.T]
    pairs = [hsic_1(a, b) for i, a in enumerate(kernels) for j, b in enumerate(kernels) if i != j]
    return torch.stack(pairs).mean() * x.shape[1] ** 2


def sums_of_the_authors(a, b, *, distinct):
    """Equation of the estimator as sums over stimuli i, j, l, m and features, in the terms of the published code; with
    ``distinct``, of a representation with itself."""
    n, p = a.shape

    def term(places):
        i, j, k, m = places
        whole = np.einsum(f"{i}a,{j}a,{k}b,{m}b->", a, a, b, b)
        return whole - np.einsum(f"{i}a,{j}a,{k}a,{m}a->", a, a, a, a) if distinct else whole

    ends = term("iijj") - term("iijl") - term("ijll") + term("ijlm")
    middle = term("ijjj") + term("iiij") - term("ijjl")
    total = term("ijji") - n / (n - 2) * term("iiii") + 2 / (n - 2) * middle + ends / ((n - 1) * (n - 2))
    return total * (p / (p - 1) if distinct else 1)


def test_a_representation_is_compared_with_itself_by_different_features():
    x, y = (random(12, width, seed=width) + 2 * random(12, 1) for width in (4, 3))

    found = linear_cka(x, y, sampled_features=True)

    expected = hsic_1(x @ x.T, y @ y.T) / (own(x) * own(y)).sqrt()
    assert found == pytest.approx(float(expected))
    both = sums_of_the_authors(x.numpy(), y.numpy(), distinct=False)
    selves = [sums_of_the_authors(one.numpy(), one.numpy(), distinct=True) for one in (x, y)]
    assert found == pytest.approx(both / np.sqrt(selves[0] * selves[1]))
    assert linear_cka(3 * x + 1, y, sampled_features=True) == pytest.approx(found)


def test_a_sample_of_neurons_estimates_the_whole_population():
    """Two areas of 3,000 neurons that share half of what they answer to; 30 of each are recorded."""
    shared, own_of_x, own_of_y = (random(200, 20, seed=seed) for seed in range(3))
    x = torch.cat((shared, own_of_x), 1) @ random(40, 3000, seed=3)
    y = torch.cat((shared, own_of_y), 1) @ random(40, 3000, seed=4)
    rng = np.random.default_rng(0)
    samples = [[torch.from_numpy(rng.choice(3000, 30, replace=False)) for _ in range(2)] for _ in range(60)]

    corrected, plain = (
        np.mean([linear_cka(x[:, a], y[:, b], sampled_features=corrects) for a, b in samples])
        for corrects in (True, False)
    )

    whole = linear_cka(x, y)
    assert corrected == pytest.approx(whole, abs=0.03)
    assert plain < whole - 0.1


def test_a_matrix_has_each_pair_and_a_site_with_itself_is_1():
    xs = [random(40, width, seed=width) + random(40, 1) for width in (3, 5, 70)]
    for others in (None, xs[1:]):
        estimate = LinearCKA(sampled_features=True)
        estimate.update(xs, others)
        found = estimate.result()
        for i, x in enumerate(xs):
            for j, y in enumerate(others or xs):
                same = others is None and i == j
                assert float(found[i, j]) == pytest.approx(1 if same else linear_cka(x, y, sampled_features=True))


def test_one_feature_and_noise_are_told():
    with pytest.raises(ConfigError, match="needs at least 2 features of each representation, and one has 1"):
        linear_cka(random(20, 1), random(20, 3), sampled_features=True)
    with pytest.warns(UserWarning, match="too few stimuli or features"):
        assert np.isnan(linear_cka(torch.eye(6), random(6, 3), sampled_features=True))


@pytest.mark.filterwarnings("ignore:a representation is not similar to itself")  # the store has noise
def test_it_is_a_key_of_forge_compare(store, capsys):
    compare = ["compare", str(store), str(store), "metric.sampled_features=true"]
    assert main(compare) == 0
    assert "cka of 40 rows" in capsys.readouterr().out
    assert main([*compare, "metric.kernel=rbf"]) == 2
    assert "metric.sampled_features: needs kernel = 'linear'" in " ".join(capsys.readouterr().err.split())
