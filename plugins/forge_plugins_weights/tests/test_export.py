"""Checkpoints that no run has written."""

import json
import weakref
from importlib.metadata import version
from zipfile import ZipFile

import pytest
import torch
from torch.serialization import get_crc32_options

import forge_core
from forge_core.checkpoint import store
from forge_core.checkpoint.store import open_checkpoint
from forge_core.errors import ConfigError, SaveError
from forge_core.registry.discovery import discover
from forge_plugins_weights.export import versions_of, write_checkpoint

VALUES = {f"model.{i}": torch.full((3, 4), float(i)) for i in range(5)} | {"model.half": torch.ones(2).bfloat16()}


def write(folder, make=VALUES.__getitem__):
    write_checkpoint(
        folder,
        {key: tensor.to("meta") for key, tensor in VALUES.items()},
        make,
        state={"vocab_size": 7},
        step=3,
        tokens=12,
        versions={"torch": "2"},
        write_more=lambda unfinished: (unfinished / "job.toml").write_text("a = 1\n"),
    )


def test_it_is_read_as_any_other(tmp_path):
    write(tmp_path / "new" / "checkpoint")

    checkpoint = open_checkpoint(tmp_path / "new" / "checkpoint")
    read = {key: torch.empty_like(tensor) for key, tensor in VALUES.items()}
    checkpoint.load(read)
    assert all(torch.equal(read[key], tensor) for key, tensor in VALUES.items())
    assert checkpoint.saved_tensors().keys() == VALUES.keys()
    assert (checkpoint.step, checkpoint.manifest.tokens, checkpoint.state()["vocab_size"]) == (3, 12, 7)
    assert {"job.toml", "state.json"} <= checkpoint.manifest.files.keys()
    members = [one for file in checkpoint.path.glob("*.distcp") for one in ZipFile(file).infolist()]
    assert {one.CRC for one in members} == {0}  # the manifest has a better sum, and each costs time
    assert get_crc32_options()  # what others save has them


def test_it_says_by_which_versions_of_forge_torch_and_plugins_it_is_made():
    made_by = versions_of(discover())

    assert (made_by["forge-core"], made_by["torch"]) == (forge_core.__version__, torch.__version__)
    assert made_by["forge-plugins-weights"] == version("forge-plugins-weights")


def test_its_description_is_read_once_however_many_tensors_are(tmp_path, monkeypatch):
    write(tmp_path / "checkpoint")
    descriptions = []
    read = store.read_description
    monkeypatch.setattr(store, "read_description", lambda folder: descriptions.append(folder) or read(folder))
    checkpoint = open_checkpoint(tmp_path / "checkpoint")

    assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in VALUES.items())

    assert len(descriptions) == 1


def test_tensors_are_made_one_after_the_other_and_let_go(tmp_path):
    alive: set[str] = set()
    most = 0

    def make(key):
        nonlocal most
        if key == "model.half":
            return VALUES[key]
        memory = VALUES[key].numpy().copy()
        alive.add(key)
        weakref.finalize(memory, alive.discard, key)
        most = max(most, len(alive))
        return torch.from_numpy(memory)

    write(tmp_path / "checkpoint", make)

    assert most == 2


@pytest.mark.parametrize(("error", "becomes"), [(ConfigError("no"), ConfigError), (RuntimeError("no"), SaveError)])
def test_nothing_is_left_of_one_that_could_not_be_made(tmp_path, error, becomes):
    def make(key):
        if key == "model.3":
            raise error
        return VALUES[key]

    with pytest.raises(becomes, match="no"):
        write(tmp_path / "checkpoint", make)

    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine").write_text(json.dumps(1))

    with pytest.raises(ConfigError, match="exists already"):
        write(tmp_path / "checkpoint")

    assert (tmp_path / "checkpoint" / "mine").exists()


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))

    with pytest.raises(ConfigError, match="has 100 B free, and the checkpoint needs 244 B"):
        write(tmp_path / "new" / "checkpoint")

    assert list(tmp_path.iterdir()) == []
