"""``forge store spectrum``: variances of principal components, and what is said of them."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_interp.principal_components import Moments
from forge_plugins_interp.spectrum import Spectrum, spectrum_of
from forge_plugins_interp.store import Store
from forge_testing.json_output import json_of


def rows_of(variances: torch.Tensor, n: int = 200) -> torch.Tensor:
    """``(n, D)`` with exactly these variances along random directions, and a mean that is not 0."""
    rng = torch.Generator().manual_seed(0)
    random = torch.randn(n, len(variances), generator=rng, dtype=torch.float64)
    scores, _ = torch.linalg.qr(random - random.mean(0))
    directions, _ = torch.linalg.qr(torch.randn(len(variances), len(variances), generator=rng, dtype=torch.float64))
    return (scores * (n * variances).sqrt()) @ directions.T + 3.0


def test_a_power_law_is_found_with_its_exponent():
    variances = torch.arange(1, 61, dtype=torch.float64) ** -1.5

    found = spectrum_of(rows_of(variances).split(64), "site")

    torch.testing.assert_close(found.variances, variances, atol=1e-9, rtol=1e-6)
    assert found.exponent(10, 500) == pytest.approx(1.5, abs=1e-6)
    assert found.exponent(59, 500) is None
    assert found.dimensions == pytest.approx(float(variances.sum() ** 2 / variances.square().sum()))
    shares = variances.cumsum(0) / variances.sum()
    assert found.components_for(0.9) == int((shares < 0.9).sum()) + 1


def test_an_exponent_is_that_of_published_code_where_there_is_no_power_law():
    ranks = torch.arange(1, 101, dtype=torch.float64)
    spectrum = Spectrum(variances=ranks**-0.8 * torch.exp(-ranks / 40), rows=500)

    weights = (1 / ranks[10:]).sqrt().numpy()  # numpy squares them
    slope, _ = np.polyfit(ranks[10:].log().numpy(), spectrum.variances[10:].log().numpy(), 1, w=weights)
    assert spectrum.exponent(11, 100) == pytest.approx(-slope)


@pytest.mark.parametrize(("variances", "dimensions"), [([1.0] * 8, 8), ([1.0, *[0.0] * 7], 1), ([0.0] * 8, 0)])
def test_dimensions_are_those_along_which_there_is_variance(variances, dimensions):
    found = spectrum_of([rows_of(torch.tensor(variances, dtype=torch.float64))], "site")

    assert found.dimensions == pytest.approx(dimensions, abs=1e-6)
    assert found.exponent(1, 8) == (pytest.approx(0, abs=1e-6) if dimensions == 8 else None)


def test_rows_that_have_no_spectrum_are_refused():
    with pytest.raises(ConfigError, match="site: a spectrum needs two rows at least, and the store has 1"):
        spectrum_of([torch.ones(1, 4)], "site")
    with pytest.raises(ConfigError, match="site: values that are not finite have no principal components"):
        spectrum_of([torch.tensor([[1.0], [float("inf")]])], "site")
    with pytest.raises(ConfigError, match=r"site has 16,385 features, .* of at most 16,384; leave it out of --sites"):
        spectrum_of([torch.zeros(2, 5, 3277)], "site")


def test_few_rows_have_few_principal_components():
    moments = Moments("resid_post")
    moments.add(torch.randn(1, 3, 8))

    with pytest.raises(ConfigError, match="8 features in 3 rows, which have at most 2 principal components"):
        moments.components(3)


def test_the_command_says_it_of_each_site_and_draws_it(store, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "spectra.png"
    assert main(["store", "spectrum", str(store), "--ranks", "1-5", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()

    assert said[0].split() == ["site", "features", "dimensions", "for", "90", "%", "exponent", "of", "1-5"]
    assert [line.split()[:2] for line in said[1:3]] == [["blocks.0.resid_post", "8"], ["blocks.1.resid_post", "10"]]
    with (tmp_path / "spectra.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["site"] == "blocks.0.resid_post"]
    variances = Store(store).array("blocks.0.resid_post").double().T.cov(correction=0)
    expected = torch.linalg.eigvalsh(variances).flip(0).tolist()
    assert [float(row["variance"]) for row in rows] == pytest.approx(expected, rel=1e-6)
    assert out.stat().st_size > 10_000


def test_features_of_all_heads_are_those_of_one_row(store_of_tokens):
    folder, tokens, _ = store_of_tokens

    (found,) = json_of("store", "spectrum", str(folder), "--sites", "blocks.0.z")["sites"]

    assert (found["features"], found["rows"], found["exponent"]) == (8, 6, None)
    variances = torch.linalg.eigvalsh(tokens.flatten(1).double().T.cov(correction=0))
    assert found["dimensions"] == pytest.approx(float(variances.sum() ** 2 / variances.square().sum()), rel=1e-5)


@pytest.mark.parametrize("ranks", ["10", "5-5", "0-4", "9-3", "a-b", "-3-4"])
def test_other_ranks_are_refused(store, capsys, ranks):
    assert main(["store", "spectrum", str(store), f"--ranks={ranks}"]) == 2
    assert f"--ranks {ranks}: must be two numbers from 1 on, the smaller one first" in capsys.readouterr().err
