"""Encoding and probes, against published packages, brute force, and what was planted."""

from __future__ import annotations

import csv
import datetime
import sys

import numpy as np
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_interp.metrics.cka import linear_cka
from forge_plugins_interp.metrics.rsa import noise_ceiling, rdm, rsa
from forge_plugins_interp.neuro.encoding import Splits, correlations, encode, halves, reliabilities
from forge_plugins_interp.neuro.recordings import Recordings, read_recordings
from forge_plugins_interp.neuro.regression import ALPHAS, PLS, Ridge
from forge_plugins_interp.neuro.resemblance import Comparison
from forge_plugins_interp.probes.probe import Labelled, code_length, probe
from forge_plugins_interp.store import Manifest, StoredSite, write_index, write_shard


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


def test_a_ceiling_is_the_reliability_of_the_mean():
    signal = random(2000, 3)
    repetitions = signal[:, None] + random(2000, 6, 3, seed=1)  # the mean of six has a noise variance of 1/6

    assert np.allclose(reliabilities(repetitions), 1 / (1 + 1 / 6), atol=0.02)
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


def test_correlations_are_those_of_numpy():
    a, b = random(30, 4), random(30, 4, seed=1)
    assert correlations(a, b).tolist() == pytest.approx([np.corrcoef(a[:, i], b[:, i])[0, 1] for i in range(4)])


# -- recordings, and forge score


IDS = np.array([f"s{i}" for i in range(40)])


@pytest.fixture
def recorded():
    generator = np.random.default_rng(0)
    return generator.normal(size=(40, 2, 3))


def write(folder, form, values, ids=IDS):
    path = folder / f"brain.{form}"
    if form == "npz":
        np.savez(path, stimulus_id=ids, values=values, neuroid_id=["a", "b", "c"])
    elif form == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file["stimulus_id"], file["values"] = ids.astype(bytes), values
            file["neuroid_id"] = np.array([b"a", b"b", b"c"])
    elif form == "csv":
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["repetition", "a", "stimulus_id", "b", "c"])
            for i, name in enumerate(ids):
                for r in range(values.shape[1]):
                    rows.writerow([r, values[i, r, 0], name, *values[i, r, 1:]])
    else:
        xarray = pytest.importorskip("xarray")
        pytest.importorskip("h5netcdf")
        flat = values.transpose(1, 0, 2).reshape(-1, 3)
        data = xarray.DataArray(
            flat[:, :, None],
            dims=("presentation", "neuroid", "time_bin"),
            coords={
                "stimulus_id": ("presentation", np.tile(ids, values.shape[1]).astype(object)),
                "neuroid_id": ("neuroid", np.array(["a", "b", "c"], dtype=object)),
            },
            name="assembly",
        )
        data.to_netcdf(path, engine="h5netcdf")
    return path


@pytest.mark.parametrize("form", ["npz", "csv", "h5", "nc"])
def test_every_format_holds_the_same_recordings(tmp_path, recorded, form):
    found = read_recordings(write(tmp_path, form, recorded))

    order = np.argsort(found.ids)
    assert found.ids[order].tolist() == sorted(IDS)
    assert np.allclose(found.repetitions[torch.from_numpy(order)], recorded[np.argsort(IDS)])
    assert found.neuroids.tolist() == ["a", "b", "c"]


def test_spikes_of_an_nwb_file_become_rates(tmp_path):
    pynwb = pytest.importorskip("pynwb")
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    file = pynwb.NWBFile(session_description="spikes", identifier="1", session_start_time=start)
    file.add_trial_column("stimulus_id", "the picture")
    for trial, stimulus in enumerate(["a", "b", "b", "a"]):
        file.add_trial(start_time=float(trial), stop_time=trial + 0.5, stimulus_id=stimulus)
    file.add_unit(spike_times=[0.1, 0.2, 0.7, 1.0, 3.4])  # 0.7 lies between trials, 1.0 begins one
    file.add_unit(spike_times=[0.5, 2.1, 2.2, 2.3, 3.1])  # 0.5 ends one
    with pynwb.NWBHDF5IO(str(tmp_path / "r.nwb"), "w") as io:
        io.write(file)

    found = read_recordings(tmp_path / "r.nwb")

    assert found.ids.tolist() == ["a", "b"]
    assert found.repetitions.tolist() == [[[4, 0], [2, 2]], [[2, 0], [0, 6]]]


@pytest.mark.parametrize(("ending", "extra"), [("h5", "neuro"), ("nc", "neuro"), ("nwb", "nwb")])
def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch, ending, extra):
    for module in ("h5py", "xarray", "pynwb"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / f"r.{ending}").touch()
    with pytest.raises(ConfigError, match=rf"needs .*: pip install 'forge-plugins-interp\[{extra}\]'"):
        read_recordings(tmp_path / f"r.{ending}")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.npz", "PK\x03\x04 cut off", "r.npz cannot be read: "),
        ("r.csv", "stimulus_id,a\ns,1\nt,x\n", "r.csv: line 3, column a: 'x' is no number"),
        ("r.csv", "stimulus_id,a\ns,1\nt,\n", "r.csv: stimulus t has no finite value for neuroid a"),
        ("r.csv", "stimulus,a\ns,1\n", "has no 'stimulus_id'; it has stimulus, a; did you mean 'stimulus'?"),
        ("r.csv", "stimulus_id,repetition,a\ns,0,1\ns,0,2\n", "stimulus s has repetition 0 more than once"),
        ("r.csv", "stimulus_id,repetition,group,a\ns,0,g,1\ns,1,h,2\n", "stimulus s has more than one group"),
    ],
)
def test_files_that_cannot_be_used_are_a_sentence(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_recordings(tmp_path / name)
    assert message in str(raised.value)


def test_an_assembly_of_one_neuroid_is_read_and_one_of_several_times_is_not(tmp_path):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    dims, ids = ("presentation", "neuroid", "time_bin"), {"image_id": ("presentation", IDS.astype(object))}
    for name, times in (("one", 1), ("two", 2)):
        values = np.random.default_rng(0).normal(size=(40, 1, times))
        xarray.DataArray(values, dims=dims, coords=ids, name="a").to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")

    assert read_recordings(tmp_path / "one.nc").repetitions.shape == (40, 1, 1)
    with pytest.raises(ConfigError, match="the dimension time_bin has 2 values; choose one of them"):
        read_recordings(tmp_path / "two.nc")


def broken(values, change):
    values = values.copy()
    change(values)
    return values


@pytest.mark.parametrize(
    ("ids", "change", "message"),
    [
        (IDS, lambda v: v.__setitem__((3, 0, 1), np.nan), "stimulus s3 has no finite value for neuroid b"),
        (IDS, lambda v: v.__setitem__((slice(None), slice(None), 2), 1.0), "neuroid c is the same for all stimuli"),
        (np.array([*IDS[:-1], "s0"]), lambda v: None, "stimulus_id 's0' is there more than once"),
        (IDS[:-1], lambda v: None, r"they are \(40, 2, 3\), and there are 39 ids"),
    ],
)
def test_recordings_that_cannot_be_used_are_told(tmp_path, recorded, ids, change, message):
    with pytest.raises(ConfigError, match=message):
        read_recordings(write(tmp_path, "npz", broken(recorded, change), ids))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two layers with a row a sample, in another order than the recordings."""
    folder = tmp_path_factory.mktemp("score") / "acts"
    folder.mkdir()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    layers = {"blocks.0.resid_post": random(40, 8).float(), "blocks.1.resid_post": random(40, 10, seed=1).bfloat16()}
    for site, values in layers.items():
        write_shard(folder, site, 0, {"values": values[order]})
    columns = {
        "stimulus_id": IDS[order.numpy()],
        "length": np.ones(40, np.int64),
        "kind": (order.numpy() % 2).astype(str),
    }
    write_index(folder, columns)
    sites = {
        site: StoredSite(dims=("sample", "width"), sizes=(values.shape[1],), dtype=str(values.dtype)[6:])
        for site, values in layers.items()
    }
    origin = {"run": "demo", "step": 4, "data": "abc"}
    Manifest(sites=sites, n_samples=40, shard_samples=40, origin=origin, complete=True).write(folder)
    return folder


def test_forge_score_finds_the_layer_that_was_recorded(store, tmp_path, capsys):
    values = (random(40, 8) @ random(8, 3, seed=4))[:, None] + 0.1 * random(40, 2, 3, seed=5)
    path, out = write(tmp_path, "npz", values.numpy()), tmp_path / "layers.png"

    assert main(["score", str(store), str(path), "--null", "5", "--out", str(out)]) == 0

    with out.with_suffix(".csv").open(newline="") as file:
        rows = {row["site"]: row for row in csv.DictReader(file)}
    assert float(rows["blocks.0.resid_post"]["score"]) > 0.95
    assert float(rows["blocks.1.resid_post"]["score"]) < 0.5
    assert float(rows["blocks.0.resid_post"]["ceiling"]) > 0.95
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "ridge over 40 stimuli, 3 neuroids" in capsys.readouterr().out
    assert float(rows["blocks.0.resid_post"]["null_high"]) < float(rows["blocks.0.resid_post"]["score"])
    others = (["pls", "--components", "5"], ["rsa", "--null", "20"], ["cka", "--null", "20"], ["ridge", "--reverse"])
    for method in others:
        assert main(["score", str(store), str(path), "--method", *method]) == 0
        lines = capsys.readouterr().out.splitlines()
        first, second = (float(line.split()[1]) for line in lines if line.startswith("blocks"))
        assert first > second, method
    by_column = ["ridge", "--groups", "kind"]
    assert main(["score", str(store), str(path), "--method", *by_column]) == 0


@pytest.mark.parametrize("method", ["rsa", "cka"])
def test_a_resemblance_has_an_interval_a_ceiling_and_a_null(method):
    x = random(60, 8)
    signal = x @ random(8, 30, seed=1)
    noisy = signal[:, None] + signal.std() * random(60, 4, 30, seed=2)
    recordings = Recordings(np.arange(60).astype(str), noisy, np.arange(30).astype(str))
    mine = {"rsa": rsa, "cka": linear_cka}[method]

    comparison = Comparison(recordings, method, shuffles=20)
    found, other = comparison.of(x), comparison.of(random(60, 8, seed=7))

    assert found.score == pytest.approx(mine(x, noisy.mean(1)))
    assert found.low < found.score < found.high
    assert other.high < found.score
    assert found.p_value == pytest.approx(1 / 21)
    assert abs(np.mean(found.null)) < 0.05
    assert found.ceiling_low < found.ceiling < found.ceiling_high
    assert found.normalised == found.score / found.ceiling


def test_rsa_of_several_subjects_is_that_of_each_and_has_their_ceiling():
    x = random(40, 8)
    signal = x @ random(8, 60, seed=1)
    values = (signal + signal.std() * random(40, 60, seed=2))[:, None]
    subjects = np.repeat(["a", "b", "c"], 20)
    recordings = Recordings(np.arange(40).astype(str), values, np.arange(60).astype(str), None, subjects)
    parts = [values[:, 0, start : start + 20] for start in (0, 20, 40)]

    found = Comparison(recordings, "rsa", shuffles=20).of(x)

    assert found.score == pytest.approx(np.mean([rsa(x, part) for part in parts]))
    assert (found.ceiling_low, found.ceiling_high) == noise_ceiling(torch.stack([rdm(part) for part in parts]))
    assert found.low < found.score < found.high
    assert found.p_value == pytest.approx(1 / 21)


def test_subjects_are_read_with_their_neuroids(tmp_path, recorded):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    whose = np.array(["x", "y", "y"])
    np.savez(tmp_path / "a.npz", stimulus_id=IDS, values=recorded, subject=whose)
    coords = {"stimulus_id": ("presentation", IDS.astype(object)), "subject": ("neuroid", whose.astype(object))}
    array = xarray.DataArray(recorded[:, 0], dims=("presentation", "neuroid"), coords=coords, name="a")
    array.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")

    for name in ("a.npz", "a.nc"):
        found = read_recordings(tmp_path / name)
        assert found.subjects.tolist() == ["x", "y", "y"]
        assert found.of(np.arange(5)).subjects.tolist() == ["x", "y", "y"]
    np.savez(tmp_path / "b.npz", stimulus_id=IDS, values=recorded, subject=whose[:2])
    with pytest.raises(ConfigError, match="subject has 2 values, and there are 3 neuroids"):
        read_recordings(tmp_path / "b.npz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "rsa", "--reverse"], "--reverse: has no effect with --method rsa"),
        (["--method", "pls", "--components", "30"], "30 components are more than"),
        (["--sites", "blocks.0.resid"], "did you mean"),
        (["--groups", "knd"], "--groups knd: the index of"),
        (["--method", "cka", "--groups", "kind"], "--groups: has no effect with --method cka"),
        (["--out", "x.pdf"], "must end with .csv or .png"),
    ],
)
def test_bad_input_of_forge_score_is_a_sentence(store, tmp_path, recorded, capsys, options, message):
    path = write(tmp_path, "npz", recorded)
    assert main(["score", str(store), str(path), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_recordings_of_other_stimuli_are_refused(store, tmp_path, recorded, capsys):
    path = write(tmp_path, "npz", recorded, np.char.add("x", IDS))
    assert main(["score", str(store), str(path)]) == 2
    assert "have no stimulus_id in common" in capsys.readouterr().err


# -- stores for other tools


def test_an_assembly_is_that_of_brain_score(store, tmp_path, capsys):
    xarray = pytest.importorskip("xarray")
    out = tmp_path / "acts.nc"
    assert main(["store", "export", str(store), "--format", "netcdf", "--out", str(out)]) == 0
    assert "blocks.1.resid_post: bf16 is written as fp32" in capsys.readouterr().err

    with xarray.open_dataset(out) as data:
        array = data["activations"]
        assert array.dims == ("presentation", "neuroid")
        assert array.shape == (40, 18)
        assert data["layer"].values.tolist() == ["blocks.0.resid_post"] * 8 + ["blocks.1.resid_post"] * 10
        assert array.attrs["identifier"] == "demo-step4"
        place = data["stimulus_id"].values.tolist().index("s7")
        assert np.allclose(array.values[place, :8], random(40, 8)[7], atol=1e-6)
    assert (tmp_path / "acts.nc.stimuli.csv").read_text().startswith("stimulus_id,length,kind")
    assert read_recordings(out).repetitions.shape == (40, 1, 18)  # and back


@pytest.mark.parametrize("form", ["npz", "npy", "hdf5", "parquet"])
def test_other_formats_hold_the_values(store, tmp_path, form):
    out = tmp_path / "out"
    assert main(["store", "export", str(store), "--format", form, "--out", str(out)]) == 0

    if form == "npz":
        values, ids = np.load(out)["blocks.0.resid_post"], np.load(out)["stimulus_id"]
    elif form == "npy":
        values = np.load(out / "blocks.0.resid_post.npy")
        ids = np.array([line.split(",")[0] for line in (out / "index.csv").read_text().splitlines()[1:]])
    elif form == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(out) as file:
            values, ids = file["blocks.0.resid_post"][()], file["stimulus_id"][()].astype(str)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out).to_pydict()
        values, ids = np.array(table["blocks.0.resid_post"]), np.array(table["stimulus_id"])
    assert np.allclose(values[ids.tolist().index("s7")], random(40, 8)[7], atol=1e-6)


@pytest.fixture(scope="module")
def store_of_tokens(tmp_path_factory):
    """Three samples in two shards, of 2, 1 and 3 tokens; and a site with a row a sample."""
    folder = tmp_path_factory.mktemp("tokens") / "acts"
    folder.mkdir()
    tokens, samples = random(6, 2, 4).float(), random(3, 5).float()
    for shard, (some, few) in enumerate(((tokens[:3], samples[:2]), (tokens[3:], samples[2:]))):
        write_shard(folder, "blocks.0.z", shard, {"values": some})
        write_shard(folder, "logits", shard, {"values": few})
    write_index(folder, {"stimulus_id": np.array(["a", "b", "c"]), "length": np.array([2, 1, 3])})
    sites = {
        "blocks.0.z": StoredSite(dims=("token", "head", "head_width"), sizes=(2, 4), dtype="float32"),
        "logits": StoredSite(dims=("sample", "vocabulary"), sizes=(5,), dtype="float32"),
    }
    Manifest(sites=sites, n_samples=3, shard_samples=2, origin={"data": "d"}, complete=True).write(folder)
    return folder, tokens, samples


@pytest.mark.parametrize("form", ["npz", "npy", "hdf5", "parquet"])
def test_tokens_of_several_shards_are_written_in_their_order(store_of_tokens, tmp_path, form):
    folder, tokens, _ = store_of_tokens
    out = tmp_path / "out"
    command = ["store", "export", str(folder), "--format", form, "--sites", "blocks.0.z", "--out", str(out)]
    assert main(command) == 0

    if form == "npz":
        values = np.load(out)["blocks.0.z"]
        assert "logits" not in np.load(out)
    elif form == "npy":
        values = np.load(out / "blocks.0.z.npy")
    elif form == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(out) as file:
            values = file["blocks.0.z"][()]
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out).to_pydict()
        assert table["stimulus_id"] == ["a", "a", "b", "c", "c", "c"]
        assert table["position"] == [0, 1, 0, 0, 1, 2]
        values = np.array(table["blocks.0.z"], np.float32).reshape(6, 2, 4)
    assert np.array_equal(values, tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("netcdf", "blocks.0.z has a row a token; use npz or hdf5"),
        ("parquet", "some a row a sample; choose by --sites"),
    ],
)
def test_rows_that_a_format_cannot_have_are_refused(store_of_tokens, tmp_path, capsys, form, message):
    command = ["store", "export", str(store_of_tokens[0]), "--format", form, "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_told_before_the_first_byte(store, tmp_path, capsys, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(["store", "export", str(store), "--format", "npz", "--out", str(tmp_path / "out")]) == 2
    assert "and the export needs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_leaves_nothing(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert main(["store", "export", str(store), "--format", "hdf5", "--out", str(tmp_path / "out")]) == 2
    assert "--format hdf5 needs h5py: pip install 'forge-plugins-interp[neuro]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_kept(store, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert main(["store", "export", str(store), "--format", "npz", "--out", str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"
    assert main(["store", "export", str(store), "--format", "npz", "--out", str(tmp_path / "none" / "out")]) == 2
    assert "the folder" in capsys.readouterr().err


# -- probes


def planted(informative: bool):
    generator = torch.Generator().manual_seed(0)
    documents = np.repeat(np.arange(30), 40)
    words = np.random.default_rng(0).integers(25, size=len(documents))
    labels = torch.randint(3, (len(documents),), generator=generator)
    values = torch.randn(len(documents), 12, generator=generator)
    if informative:
        values[:, :3] += 3 * torch.nn.functional.one_hot(labels, 3)
    return Labelled(values=values, labels=labels, documents=documents, words=words)


@pytest.mark.parametrize("kind", ["logistic", "ridge", "mlp"])
def test_a_probe_reads_what_is_there_and_not_what_is_not(kind):
    found, nothing = probe(planted(True), kind=kind), probe(planted(False), kind=kind)

    assert found.accuracy > 0.9
    assert found.low <= found.accuracy <= found.high
    assert nothing.accuracy == pytest.approx(1 / 3, abs=0.12)
    assert found.control < 0.5
    assert found.selectivity == pytest.approx(found.accuracy - found.control)
    assert found.chance == pytest.approx(1 / 3, abs=0.05)


def test_a_probe_is_that_of_sklearn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    from forge_plugins_interp.probes.probe import _fit

    data = planted(True)
    mine = _fit(data.values, data.labels, 3, 1.0, "logistic", 0)(data.values)
    theirs = linear_model.LogisticRegression(C=0.5, tol=1e-8, max_iter=1000).fit(
        data.values.numpy(), data.labels.numpy()
    )
    assert (mine.numpy() == theirs.predict(data.values.numpy())).mean() > 0.995


def test_a_ridge_probe_is_that_of_sklearn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    from forge_plugins_interp.probes.probe import _fit

    data = planted(True)
    mine = _fit(data.values, data.labels, 3, 5.0, "ridge", 0)(data.values)
    theirs = linear_model.Ridge(10.0).fit(data.values.double().numpy(), np.eye(3)[data.labels.numpy()])
    assert np.array_equal(mine.numpy(), theirs.predict(data.values.double().numpy()).argmax(1))


def test_labels_that_are_read_take_few_bits():
    uniform = np.log2(3)
    assert probe(planted(True)).bits < 0.5 * uniform
    assert probe(planted(False)).bits == pytest.approx(uniform, rel=0.25)
    few = torch.arange(8) % 3
    assert code_length(torch.zeros(8, 2), few, 3, 0) == pytest.approx(8 * uniform)  # the uniform code


def test_balanced_accuracy_sees_that_a_rare_class_is_lost():
    data = planted(False)
    rare = Labelled(values=data.values, labels=(torch.arange(1200) % 20 == 0).long(), documents=data.documents)
    found = probe(rare)

    assert found.accuracy == found.majority > 0.9
    assert found.balanced == 0.5


def test_few_documents_and_one_class_are_refused():
    data = planted(True)
    few = Labelled(values=data.values[:120], labels=data.labels[:120], documents=data.documents[:120])
    with pytest.raises(ConfigError, match="at least 5 documents to hold some out, and there are 3"):
        probe(few)
    single = Labelled(values=data.values, labels=torch.zeros_like(data.labels), documents=data.documents)
    with pytest.raises(ConfigError, match="a single class"):
        probe(single)


def test_forge_probe_reads_labels_and_columns(store, tmp_path, capsys):
    labels = tmp_path / "labels.csv"
    labels.write_text("stimulus_id,label\n" + "".join(f"s{i},{'even' if i % 2 == 0 else 'odd'}\n" for i in range(40)))
    assert main(["probe", str(store), "--labels", str(labels), "--out", str(tmp_path / "p.png")]) == 0
    by_file = capsys.readouterr().out
    assert main(["probe", str(store), "--column", "kind"]) == 0
    by_column = capsys.readouterr().out

    np.savez(tmp_path / "l.npz", stimulus_id=IDS, label=["even" if i % 2 == 0 else "odd" for i in range(40)])
    assert main(["probe", str(store), "--labels", str(tmp_path / "l.npz")]) == 0
    assert capsys.readouterr().out.splitlines() == by_file.splitlines()[:3]
    assert main(["probe", str(store), "--column", "kind", "--documents", "stimulus_id"]) == 0
    assert by_file.splitlines()[1].startswith("blocks.0.resid_post")
    assert by_column.splitlines()[0] == by_file.splitlines()[0]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --labels FILE or --column NAME"),
        (["--column", "knd"], "did you mean 'kind'"),
        (["--labels", "nowhere.csv"], "cannot be read"),
        (["--column", "kind", "--documents", "knd"], "--documents knd: the index has"),
    ],
)
def test_bad_input_of_forge_probe_is_a_sentence(store, capsys, options, message):
    assert main(["probe", str(store), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("stimulus_id,token,label\na,-1,x\n", "line 2: token must be a number from 0, got '-1'"),
        ("stimulus_id,token,label\na,0,x\na,0,y\n", "stimulus_id 'a' has a label at token 0 more than once"),
        ("stimulus_id,token,label\na,0,\n", "line 2 has no label"),
        ("stimulus_id,token,label\nb,1,x\n", "token 1 lies beyond the 1 of b"),
    ],
)
def test_labels_that_cannot_be_used_are_a_sentence(store_of_tokens, tmp_path, capsys, rows, message):
    (tmp_path / "l.csv").write_text(rows)
    command = ["probe", str(store_of_tokens[0]), "--sites", "blocks.0.z", "--labels", str(tmp_path / "l.csv")]
    assert main(command) == 2
    assert message in " ".join(capsys.readouterr().err.split())
