"""Banded ridge and delays, against closed forms, himalaya and brute force."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_interp.neuro.banded_ridge import BandedRidge
from forge_plugins_interp.neuro.delays import delayed
from forge_plugins_interp.neuro.encoding import Splits, correlations, encode, split_correlations
from forge_plugins_interp.neuro.regression import Ridge
from forge_plugins_interp.store import Manifest, StoredSite, write_index, write_shard


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(n=60, widths=(8, 12), seed=0):
    """Targets of the first band, of the second, and of both."""
    bands = [random(n, width, seed=seed + number) for number, width in enumerate(widths)]
    first, second = (band @ random(band.shape[1], 4, seed=seed + 7) for band in bands)
    y = torch.cat((first, second, first + second), 1)
    return torch.cat(bands, 1), y + y.std() * random(n, 12, seed=seed + 9)


@pytest.mark.parametrize("widths", [(8, 12), (8, 90)], ids=["fewer features than stimuli", "more"])
def test_with_equal_shares_it_is_ridge(widths):
    x, y = planted(widths=widths)

    found = BandedRidge(widths=widths, draws=1, alphas=[3.0]).of(x)(y)

    assert torch.allclose(found.weights, Ridge(alphas=[6.0]).of(x)(y).weights, atol=1e-9)  # α / ½
    new = random(5, sum(widths), seed=5)
    assert torch.allclose(found.parts(new, widths).sum(0) + found.y_mean, found(new))


@pytest.mark.parametrize("widths", [(8, 12), (8, 90)], ids=["fewer features than stimuli", "more"])
def test_each_band_has_its_own_penalty(widths, monkeypatch):
    x, y = planted(widths=widths)
    shares = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    monkeypatch.setattr(BandedRidge, "shares", lambda self: shares)

    found = BandedRidge(widths=widths, alphas=[2.0]).of(x)(y)

    a, penalties = x - x.mean(0), (2.0 / shares[0]).repeat_interleave(torch.tensor(widths))
    expected = torch.linalg.solve(a.T @ a + penalties.diag(), a.T @ (y - y.mean(0)))
    assert torch.allclose(found.weights, expected, atol=1e-9)


@pytest.mark.parametrize("groups", [None, np.repeat(np.arange(12), 5)], ids=["stimuli", "groups"])
def test_the_search_is_that_of_himalaya(groups):
    ridge = pytest.importorskip("himalaya.ridge")
    x, y = planted()
    ours = BandedRidge(widths=(8, 12), draws=30, alphas=(0.1, 1.0, 10.0, 100.0))

    found = ours.of(x, groups)(y)

    folds = [(train.numpy(), held.numpy()) for train, held in ours._folds(60, groups)]
    assert sorted(np.concatenate([held for _, held in folds])) == list(range(60))
    if groups is not None:
        assert all(not set(groups[train]) & set(groups[held]) for train, held in folds)
    theirs = ridge.solve_group_ridge_random_search(
        [one.numpy() for one in x.split((8, 12), 1)],
        y.numpy(),
        n_iter=ours.shares().numpy(),
        alphas=np.array(ours.alphas),
        fit_intercept=True,
        cv=folds,
        return_weights=True,
        progress_bar=False,
    )
    assert np.allclose(found.weights, theirs[1], atol=1e-8)
    assert np.allclose(found.y_mean - found.x_mean @ found.weights, theirs[3], atol=1e-8)


def test_shares_are_of_the_simplex_and_begin_with_equal_ones():
    shares = BandedRidge(widths=(2, 2, 2), draws=50).shares()

    assert shares.shape == (50, 3)
    assert torch.allclose(shares.sum(1), torch.ones(50, dtype=torch.float64))
    assert shares[0].tolist() == [1 / 3] * 3
    assert (shares[1::2].amax(1) > 0.5).double().mean() < (shares[2::2].amax(1) > 0.5).double().mean()


def test_it_predicts_better_than_ridge_where_a_wide_band_is_noise():
    signal, noise = random(80, 6), 5 * random(80, 200, seed=1)
    y = signal @ random(6, 5, seed=2) + random(80, 5, seed=3)
    x, splits = torch.cat((signal, noise), 1), Splits(number=4)

    banded = encode(x, y[:, None], BandedRidge(widths=(6, 200), draws=20), splits=splits, widths=(6, 200))

    assert banded.score > encode(x, y[:, None], Ridge(), splits=splits).score + 0.2
    first, second = banded.of_bands.mean(1).tolist()
    assert first > 10 * abs(second)


def test_parts_of_a_correlation_are_those_of_himalaya_and_sum_to_it():
    scoring = pytest.importorskip("himalaya.scoring")
    y, parts = random(30, 4), random(2, 30, 4, seed=1)

    found = split_correlations(y, parts)

    assert np.allclose(found, scoring.correlation_score_split(y.numpy(), parts.numpy()))
    assert torch.allclose(found.sum(0), correlations(y, parts.sum(0)))
    assert bool(split_correlations(torch.ones(30, 4, dtype=torch.float64), parts).isnan().all())
    assert split_correlations(y, torch.zeros_like(parts)).abs().max() == 0


def test_the_null_of_sets_that_are_fitted_together_is_that_of_each(monkeypatch):
    x, y = planted(n=30)
    regression = BandedRidge(widths=(8, 12), draws=4)
    together = encode(x, y[:, None], regression, splits=Splits(number=2), shuffles=5)
    monkeypatch.setattr("forge_plugins_interp.neuro.encoding._TARGETS", 1)

    one_by_one = encode(x, y[:, None], regression, splits=Splits(number=2), shuffles=5)

    assert together.null == pytest.approx(one_by_one.null)
    assert together.score == pytest.approx(one_by_one.score)


def test_scores_that_take_long_say_how_far_they_are(stories, monkeypatch, capsys):
    monkeypatch.setattr("forge_plugins_interp.neuro.encoding._SECONDS", 0.0)

    assert main(["score", *map(str, stories), "--splits", "2", "--null", "1", "--sites", "blocks.0.*"]) == 0

    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == [f"{number} of 4 maps" for number in (1, 2, 3, 4)]
    assert said[-1].endswith("about 0.0 min left")


def test_sets_that_are_fitted_together_are_told_of_when_they_are_fitted(monkeypatch):
    """The first of them was told of as if it had taken the time of all: hours too many were left."""
    monkeypatch.setattr("forge_plugins_interp.neuro.encoding._SECONDS", 0.0)
    x, y = planted(n=30)
    said = []

    encode(x, y[:, None], BandedRidge(widths=(8, 12), draws=2), splits=Splits(number=2), shuffles=5, log=said.append)

    assert [line.partition(";")[0] for line in said] == ["6 of 12 maps", "12 of 12 maps"]


def test_delays_do_not_go_across_groups():
    x, groups = torch.arange(1.0, 7)[:, None].double(), np.array(["a", "b", "a", "a", "b", "b"])

    found = delayed(x, [0, 1, 2], groups)

    mean = 3.5
    assert found.tolist() == [
        [1, mean, mean],
        [2, mean, mean],
        [3, 1, mean],
        [4, 3, 1],
        [5, 2, mean],
        [6, 5, 2],
    ]
    assert delayed(random(5, 3), [2]).shape == (5, 3)
    with pytest.raises(ConfigError, match="delay 3: the longest group has 3 rows"):
        delayed(x, [3], groups)


@pytest.fixture
def stories(tmp_path):
    """A store of 6 stories of 20 moments, and recordings of what one site was two moments before, for all but some."""
    folder = tmp_path / "acts"
    folder.mkdir()
    ids, story = np.array([f"t{number}" for number in range(120)]), np.repeat([f"story{one}" for one in range(6)], 20)
    layers = {f"blocks.{layer}.resid_post": random(120, 5, seed=layer) for layer in range(2)}
    for site, values in layers.items():
        write_shard(folder, site, 0, {"values": values.float()})
    write_index(folder, {"stimulus_id": ids, "length": np.ones(120, np.int64), "story": story})
    sites = {site: StoredSite(dims=("sample", "width"), sizes=(5,), dtype="float32") for site in layers}
    Manifest(sites=sites, n_samples=120, shard_samples=120, origin={"data": "d"}, complete=True).write(folder)
    late = delayed(layers["blocks.1.resid_post"], [2], story)
    values = late @ random(5, 4, seed=5) + 0.3 * random(120, 4, seed=6)
    kept = np.setdiff1d(np.arange(120), np.arange(0, 120, 7))
    np.savez(tmp_path / "brain.npz", stimulus_id=ids[kept], values=values[kept])
    return folder, tmp_path / "brain.npz"


def scores(path):
    with path.open(newline="") as file:
        return {row["site"]: row for row in csv.DictReader(file)}


def test_what_answers_late_is_found_with_delays(stories, tmp_path):
    score = ["score", *map(str, stories), "--groups", "story", "--splits", "4", "--out"]

    assert main([*score, str(tmp_path / "now.csv")]) == 0
    assert main([*score, str(tmp_path / "late.csv"), "--delays", "1,2,3"]) == 0

    now, late = scores(tmp_path / "now.csv"), scores(tmp_path / "late.csv")
    assert abs(float(now["blocks.1.resid_post"]["score"])) < 0.3
    assert float(late["blocks.1.resid_post"]["score"]) > 0.8  # also where the row before has no recording
    assert float(late["blocks.0.resid_post"]["score"]) < 0.3


def test_sites_share_out_a_score(stories, tmp_path, capsys):
    out = tmp_path / "bands.png"
    score = ["score", *map(str, stories), "--groups", "story", "--splits", "3", "--draws", "10"]
    score += ["--method", "banded_ridge", "--out", str(out)]

    assert main([*score, "--delays", "1,2"]) == 0

    said, rows = capsys.readouterr().out, scores(out.with_suffix(".csv"))
    assert "banded_ridge over 102 stimuli, 4 neuroids" in said
    assert [*rows] == ["all", "blocks.0.resid_post", "blocks.1.resid_post"]
    parts = {site: float(row["part"]) for site, row in rows.items()}
    assert float(rows["all"]["score"]) > 0.8
    assert parts["blocks.0.resid_post"] + parts["blocks.1.resid_post"] == pytest.approx(parts["all"])
    assert parts["blocks.1.resid_post"] > 0.75
    assert abs(parts["blocks.0.resid_post"]) < 0.1
    assert rows["blocks.0.resid_post"]["score"] == ""
    assert out.read_bytes().startswith(b"\x89PNG")
    assert main([*score, "--null", "3"]) == 0
    assert scores(out.with_suffix(".csv"))["all"]["p_value"] in ("0.25", "0.5", "0.75", "1.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delays", "1,x"], "--delays 1,x: must be different whole numbers from 0"),
        (["--delays", "1,1"], "--delays 1,1: must be different whole numbers from 0"),
        (["--delays", "-1"], "--delays -1: must be different whole numbers from 0"),
        (["--delays", "20"], "delay 20: the longest group has 20 rows"),
        (["--delays", "1", "--groups", "stories"], "did you mean 'story'?"),
        (["--delays", "1", "--null", "9"], "--null: has no effect with --delays"),
        (["--delays", "1", "--reverse"], "--delays: are of the model's features"),
        (["--delays", "1", "--method", "rsa", "--groups", ""], "has no effect with --method rsa"),
        (["--method", "banded_ridge", "--reverse"], "--reverse: has no effect with --method banded_ridge"),
        (["--method", "banded_ridge", "--sites", "blocks.0.*"], "needs two sites at least"),
    ],
)
def test_bad_input_is_a_sentence(stories, capsys, arguments, message):
    groups = [] if "--groups" in arguments else ["--groups", "story"]
    assert main(["score", *map(str, stories), *groups, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_features_that_the_memory_cannot_have_together_are_refused_before_they_are_read(stories, monkeypatch, capsys):
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": 30}[name])
    monkeypatch.setattr("forge_plugins_interp.store.Store.array", None)

    assert main(["score", *map(str, stories), "--groups", "story", "--method", "banded_ridge"]) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"the features of 2 sites take [\d.]+ KiB, and this machine has 30.0 KiB; choose fewer", said), (
        said
    )


def test_delays_need_groups_and_penalties_two_of_them(stories, capsys):
    assert main(["score", *map(str, stories), "--delays", "1"]) == 2
    assert "--delays: needs --groups, a column of the store" in " ".join(capsys.readouterr().err.split())
    x, y = planted(n=20)
    with pytest.raises(ConfigError, match=r"the training part has the one group '[ab]'"):
        encode(x, y[:, None], BandedRidge(widths=(8, 12)), groups=np.repeat(["a", "b"], 10))
