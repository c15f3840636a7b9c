"""Recordings of every format, and ``forge score``."""

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
from forge_plugins_interp.neuro.encoding import halves
from forge_plugins_interp.neuro.recordings import Recordings, read_recordings
from forge_plugins_interp.neuro.resemblance import Comparison

IDS = np.array([f"s{i}" for i in range(40)])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    elif form == "mat":
        io = pytest.importorskip("scipy.io")
        io.savemat(path, {"stimulus_id": ids.astype(object), "values": values, "neuroid_id": ["a", "b", "c"]})
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


@pytest.mark.parametrize("form", ["npz", "csv", "h5", "nc", "mat"])
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


@pytest.mark.parametrize(("ending", "extra"), [("h5", "neuro"), ("nc", "neuro"), ("mat", "neuro"), ("nwb", "nwb")])
def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch, ending, extra):
    for module in ("h5py", "xarray", "scipy", "pynwb"):
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
        ("r.csv", "stimulus_id,a\ns,1\nt,1,5\n", "r.csv cannot be read: line 3 has more fields than the header"),
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


def test_a_file_of_matlab_may_have_numbers_for_names_and_one_neuroid(tmp_path):
    io = pytest.importorskip("scipy.io")
    values, names = np.random.default_rng(0).normal(size=(12, 3)), np.arange(12.0)[:, None]
    groups = np.repeat(["story", "a"], 6)  # rows of characters, filled up with spaces
    io.savemat(tmp_path / "a.mat", {"stimulus_id": names, "values": values, "group": groups, "note": "mine"})
    io.savemat(tmp_path / "b.mat", {"stimulus_id": names, "values": values, "neuroid_id": "unit"})

    found, of_one = read_recordings(tmp_path / "a.mat"), read_recordings(tmp_path / "b.mat")

    assert found.ids.tolist() == [str(number) for number in range(12)]
    assert found.repetitions.shape == (12, 1, 3)
    assert found.groups.tolist() == ["story"] * 6 + ["a"] * 6
    assert of_one.repetitions[:, :, 0].tolist() == values.tolist()  # three repetitions, as MATLAB stores (12, 3, 1)
    assert of_one.neuroids.tolist() == ["unit"]


def test_a_file_of_matlab_that_cannot_be_read_is_a_sentence(tmp_path):
    io, h5py = pytest.importorskip("scipy.io"), pytest.importorskip("h5py")
    whole, path = tmp_path / "whole.mat", tmp_path / "r.mat"
    io.savemat(whole, {"stimulus_id": np.arange(9), "values": np.zeros((9, 2))}, do_compression=True)
    content = whole.read_bytes()
    for damaged in (content[:100], content[:150], content[:-20], content[:140] + b"garbage" + content[147:], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"r\.mat"):
            read_recordings(path)
    with h5py.File(tmp_path / "h5", "w", userblock_size=512) as file:
        file["values"] = np.zeros((2, 9))
    header = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
    path.write_bytes(header.ljust(512, b"\x00") + (tmp_path / "h5").read_bytes()[512:])
    with pytest.raises(ConfigError, match=r"is a file of MATLAB 7\.3; save it with the option -v7, or as \.h5"):
        read_recordings(path)
    io.savemat(path, {"values": np.zeros((9, 2))})
    with pytest.raises(ConfigError, match="has no 'stimulus_id'"):
        read_recordings(path)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": ["a", "b"]}, "group has 2 values, and there are 40 stimuli"),
        ({"group": ["a", "b"] * 40}, "group has 80 values, and there are 40 stimuli"),
        ({"neuroid_id": ["a", "b"]}, "neuroid_id has 2 values, and there are 3 neuroids"),
        ({"subject": ["a", "b"]}, "subject has 2 values, and there are 3 neuroids"),
        ({"values": np.full((40, 3), "x")}, "values must be real numbers, and are <U1"),
        ({"values": np.full((40, 3), 1j)}, "values must be real numbers, and are complex128"),
        ({"values": np.ones((40, 0, 3))}, r"values has the shape \(40, 0, 3\), in which there are none"),
        ({"values": np.ones((40, 0))}, r"values has the shape \(40, 0\), in which there are none"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_told(tmp_path, recorded, change, message):
    np.savez(tmp_path / "r.npz", **{"stimulus_id": IDS, "values": recorded} | change)
    with pytest.raises(ConfigError, match=message):
        read_recordings(tmp_path / "r.npz")


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


@pytest.mark.parametrize(("method", "number"), [("rsa", 4), ("rsa", 3), ("cka", 4)])
def test_a_resemblance_has_an_interval_a_ceiling_and_a_null(method, number):
    x = random(60, 8)
    signal = x @ random(8, 30, seed=1)
    noisy = signal[:, None] + signal.std() * random(60, number, 30, seed=2)
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
    times = number / (number // 2)  # as long as a half
    each = [mine(first, second) for first, second in halves(noisy)]
    assert found.ceiling == pytest.approx(np.mean([times * r / (1 + (times - 1) * r) for r in each]))


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
        (["--sites", "router"], "has no site 'router'; It has blocks.0.resid_post, blocks.1.resid_post"),
        (["--sites", ","], "--sites ',': names no site; "),
        (["--components", "3"], "--components: has no effect with --method ridge"),
        (["--method", "pls", "--draws", "3"], "--draws: has no effect with --method pls"),
        (["--method", "rsa", "--splits", "3"], "--splits: has no effect with --method rsa"),
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


@pytest.mark.parametrize("method", ["rsa", "cka"])
def test_what_is_the_same_for_all_stimuli_has_neither_a_score_nor_a_p(method):
    """NaN is above no score of the null, which made p as small as it can be."""
    recordings = Recordings(IDS, random(40, 1, 6), np.arange(6).astype(str))

    with pytest.warns(UserWarning, match="representation"):
        found = Comparison(recordings, method, shuffles=9).of(random(1, 8).expand(40, 8))

    assert np.isnan([found.score, found.low, found.high]).all()
    assert found.p_value is None
