"""``forge store export``."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from forge_core.cli import main
from forge_plugins_interp.neuro.recordings import read_recordings
from forge_plugins_interp.store import Store, write_index


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


@pytest.mark.parametrize("form", ["npz", "npy", "hdf5", "parquet", "zarr", "mat"])
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
    elif form == "zarr":
        group = pytest.importorskip("zarr").open_group(out, mode="r")
        values, ids = group["blocks.0.resid_post"][:], group["stimulus_id"][:]
        assert group["blocks.1.resid_post"].dtype == np.float32  # of bf16
    elif form == "mat":
        file = pytest.importorskip("scipy.io").loadmat(out)
        values, ids = file["blocks_0_resid_post"], np.array([one.item() for one in file["stimulus_id"][:, 0]])
        assert [one.item() for one in file["sites"][:, 0]] == ["blocks.0.resid_post", "blocks.1.resid_post"]
        assert file["length"].shape == (40, 1)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out).to_pydict()
        values, ids = np.array(table["blocks.0.resid_post"]), np.array(table["stimulus_id"])
    assert np.allclose(values[ids.tolist().index("s7")], random(40, 8)[7], atol=1e-6)


@pytest.mark.parametrize("form", ["npz", "npy", "hdf5", "parquet", "zarr", "mat"])
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
    elif form == "zarr":
        group = pytest.importorskip("zarr").open_group(out, mode="r")
        assert "logits" not in group
        assert group["blocks.0.z"].chunks == (3, 2, 4)
        values = group["blocks.0.z"][:]
    elif form == "mat":
        values = pytest.importorskip("scipy.io").loadmat(out)["blocks_0_z"]
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out).to_pydict()
        assert table["stimulus_id"] == ["a", "a", "b", "c", "c", "c"]
        assert table["position"] == [0, 1, 0, 1, 4, 5]
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


def test_names_and_sizes_that_matlab_has_not_are_refused(store, tmp_path, capsys, monkeypatch):
    write_index(store, {**Store(store).columns, "blocks_0_resid_post": np.arange(40)})
    out = tmp_path / "out.mat"
    export = ["store", "export", str(store), "--format", "mat", "--out", str(out)]
    try:
        assert main(export) == 2
        said = capsys.readouterr().err
        assert "blocks.0.resid_post and blocks_0_resid_post would both be called blocks_0_resid_post" in said
        assert main([*export, "--sites", "blocks.1.resid_post"]) == 0
    finally:
        columns = {name: one for name, one in Store(store).columns.items() if name != "blocks_0_resid_post"}
        write_index(store, columns)
    out.unlink()
    monkeypatch.setattr("forge_plugins_interp.store_export._MAT_BYTES", 1000)
    assert main(export) == 2
    assert "blocks.0.resid_post takes 1.2 KiB, and a matrix of MATLAB 5" in capsys.readouterr().err
    assert not out.exists()


def test_a_full_disk_is_told_before_the_first_byte(store, tmp_path, capsys, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(["store", "export", str(store), "--format", "npz", "--out", str(tmp_path / "out")]) == 2
    assert "and the export needs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("form", "library"), [("hdf5", "h5py"), ("zarr", "zarr"), ("mat", "scipy")])
def test_an_export_that_fails_leaves_nothing(store, tmp_path, capsys, monkeypatch, form, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["store", "export", str(store), "--format", form, "--out", str(tmp_path / "out")]) == 2
    assert f"--format {form} needs {library}: pip install 'forge-plugins-interp[neuro]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_kept(store, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert main(["store", "export", str(store), "--format", "npz", "--out", str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"
    assert main(["store", "export", str(store), "--format", "npz", "--out", str(tmp_path / "none" / "out")]) == 2
    assert "the folder" in capsys.readouterr().err
