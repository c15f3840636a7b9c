"""Goals G20 and G21: one flipped bit is noticed, and a checkpoint from a stranger does nothing but fail."""

import io
import json
import pickle
import random
import re
import resource
import shutil
import sys
import zipfile
from pathlib import Path, PosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from faults.damage import flip_bit, rewrite_manifest, rewrite_metadata, sign
from forge_core.checkpoint.manifest import visible_damage
from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore, open_checkpoint
from forge_core.distributed.mesh import join_process_group
from forge_core.errors import ConfigError

TENSORS = {"model.w": (64, 48), "model.b": (7,), "optimizer.w.exp_avg": (64, 48), "optimizer.w.step": ()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 7 and 8, full of 7 and of 8."""
    store = CheckpointStore(tmp_path_factory.mktemp("saved") / "checkpoints")
    join_process_group(torch.device("cpu"))
    saver = Saver(store, torch.device("cpu"), background=False, timeout=60, may_commit=lambda: None)
    for step in (7, 8):
        saver.save(_snapshot(step))
        assert saver.finish().error is None
    saver.close()
    torch.distributed.destroy_process_group()
    return store.path


def _snapshot(step):
    def write_more(folder):
        (folder / "job.toml").write_text("[train]\nsteps = 10\n")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"vocabulary": list(range(200))}))
        return {}

    return Snapshot(
        step=step,
        tokens=step * 100,
        tensors={key: torch.full(shape, float(step)) for key, shape in TENSORS.items()},
        state={"step": step, "values": [step / 3] * 20},
        mesh={"pp": 1},
        versions={"forge-core": "1"},
        metrics={"eval/loss": 1 / 3},
        write_more=write_more,
    )


@pytest.fixture
def store(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True)
    return CheckpointStore(tmp_path / "checkpoints")


def _loaded(checkpoint):
    """All of it is read; returns which values there are."""
    assert checkpoint.state()["step"] == checkpoint.step
    tensors = {key: torch.zeros(shape) for key, shape in TENSORS.items()}
    checkpoint.load(tensors)
    return {value for tensor in tensors.values() for value in tensor.unique().tolist()}


def test_one_flipped_bit_anywhere_is_noticed_and_the_checkpoint_before_it_is_used(store):
    newest = store.folder(8)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    chosen = random.Random(20)
    refused = 0
    for trial in range(100):
        # every file at least once, as large files would take all of a hundred bits drawn from their sum
        file = files[trial % len(files)]
        bit = chosen.randrange(file.stat().st_size * 8)
        reported = []

        flip_bit(file, bit)
        found = store.newest(reported.append)
        flip_bit(file, bit)

        assert found.step == 7, f"bit {bit} of {file.name}"
        assert len(reported) == 1
        assert file.relative_to(newest).as_posix() in reported[0] or file.name == "manifest.json", reported
        assert "step_00000008 cannot be used" in reported[0]
        refused += 1
    assert refused == 100
    assert _loaded(store.newest(lambda line: pytest.fail(line))) == {8.0}


def test_flipped_bits_find_out_a_manifest_that_has_sizes_only(store, monkeypatch):
    """G4: the test above has teeth."""
    monkeypatch.setattr("forge_core.checkpoint.store.damage", visible_damage)
    file = store.folder(8) / "__0_0.distcp"

    flip_bit(file, file.stat().st_size * 4)

    assert store.newest(lambda line: None).step == 8


class Executed:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        import os

        return os.mkdir, (self.marker,)


def _executable_metadata(path, marker, outside):
    (path / ".metadata").write_bytes(pickle.dumps(Executed(marker)))
    sign(path)


def _executable_bytes(path, marker, outside):
    data = path / "__9_0.distcp"
    torch.save(Executed(marker), data)

    def change(metadata):
        metadata.state_dict_metadata["extra"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("extra")] = _place(metadata, "__9_0.distcp", 0, data.stat().st_size)

    _list(path, "__9_0.distcp")
    rewrite_metadata(path, change)


def _executable_record(path, marker, outside):
    _replace_record(path, _torch_bytes(Executed(marker)))


def _class_that_is_written_to(path, marker, outside):
    """``BUILD`` on a class changes it for the whole process: here, what every path says its name is."""

    class Payload:
        def __reduce__(self):
            return dict, ((("a", 1),),)

    pickled = b"\x80\x04" + pickle.GLOBAL + b"pathlib\nPosixPath\n" + pickle.NONE
    pickled += pickle.EMPTY_DICT + pickle.SHORT_BINUNICODE + b"\x04name" + pickle.SHORT_BINUNICODE + b"\x01x"
    pickled += pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD + pickle.STOP
    (path / ".metadata").write_bytes(pickled)
    sign(path)


def _place(metadata, name, offset, length):
    place = next(iter(metadata.storage_data.values()))
    return type(place)(name, offset, length)


def _list(path, name):
    rewrite_manifest(path, lambda body: body["files"].update({name: {"bytes": 0, "xxh3_128": ""}}))
    sign(path)


def _pointing_at(name):
    def harm(path, marker, outside):
        def change(metadata):
            index = next(iter(metadata.storage_data))
            metadata.storage_data[index] = _place(metadata, name or str(outside / "secret.distcp"), 0, 8)

        rewrite_metadata(path, change)

    return harm


def _unlisted_file(path, marker, outside):
    shutil.copy(path / "__0_0.distcp", path / "__9_0.distcp")

    def change(metadata):
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = _place(metadata, "__9_0.distcp", place.offset, place.length)

    rewrite_metadata(path, change)


def _linked(name):
    def harm(path, marker, outside):
        target = outside / Path(name).name
        if (path / name).is_dir():
            shutil.copytree(path / name, target)
            shutil.rmtree(path / name)
        else:
            shutil.copy(path / name, target)
            (path / name).unlink()
        (path / name).symlink_to(target)

    return harm


def _linked_to_itself(name):
    def harm(path, marker, outside):
        file = path / name
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        file.symlink_to(file.name)

    return harm


def _listed_outside(name):
    def harm(path, marker, outside):
        shutil.copy(path / "state.json", outside / "secret.distcp")
        where = name or str(outside / "secret.distcp")
        entry = json.loads((path / "manifest.json").read_text())["files"]["state.json"]
        rewrite_manifest(path, lambda body: body["files"].update({where: entry}))

    return harm


def _unlisted(name):
    return lambda path, marker, outside: rewrite_manifest(path, lambda body: body["files"].pop(name))


def _manifest(change):
    return lambda path, marker, outside: rewrite_manifest(path, change)


def _deep_manifest(path, marker, outside):
    (path / "manifest.json").write_text("[" * 200_000)


def _state(text):
    def harm(path, marker, outside):
        (path / "state.json").write_text(text)
        sign(path)

    return harm


def _huge(shape, chunk):
    """A tensor of terabytes, of which a few bytes are there."""

    def harm(path, marker, outside):
        def change(metadata):
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(chunk)), torch.Size(chunk))]
            key = "optimizer.w.exp_avg"
            metadata.state_dict_metadata[key] = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)

        rewrite_metadata(path, change)

    return harm


def _the_same_bytes_for_many(*, less):
    """``less`` is the length of a record of nothing that is described."""

    def harm(path, marker, outside):
        def change(metadata):
            key, origin = "model.w", torch.Size([0, 0])
            described, places = metadata.state_dict_metadata, metadata.storage_data
            place = places[MetadataIndex(key, origin)]
            nothing = _place(metadata, place.relative_path, 0, less)
            metadata.storage_data = {MetadataIndex("nothing", origin): nothing, **places}
            for i in range(1000):
                described[f"more{i}"] = described[key]
                metadata.storage_data[MetadataIndex(f"more{i}", origin)] = place

        rewrite_metadata(path, change)

    return harm


def _odd_places(offset, length):
    def harm(path, marker, outside):
        def change(metadata):
            index = next(iter(metadata.storage_data))
            metadata.storage_data[index] = _place(metadata, "__0_0.distcp", offset, length)

        rewrite_metadata(path, change)

    return harm


def _transformed(path, marker, outside):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["stream.zstd/1"]

    rewrite_metadata(path, change)


def _zip_bomb(path, marker, outside):
    """A record whose tensor has 2 GiB once it is unpacked, in 2 MiB."""
    stored, packed = zipfile.ZipFile(io.BytesIO(_torch_bytes(torch.zeros(64, 48)))), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bomb:
        for name in stored.namelist():
            if name.endswith("/data/0"):
                with bomb.open(name, "w", force_zip64=True) as record:
                    for _ in range(512):
                        record.write(bytes(1 << 22))
            elif name.endswith("/data.pkl"):
                bomb.writestr(name, stored.read(name).replace(b"M\x00\x0c", b"J\x00\x00\x00\x20"))
            else:
                bomb.writestr(name, stored.read(name))
    _replace_record(path, packed.getvalue())


def _record_of(value):
    return lambda path, marker, outside: _replace_record(path, _torch_bytes(value))


def _no_byte_order(path, marker, outside):
    _replace_record(path, _torch_bytes(torch.zeros(64, 48)).replace(b"little", b"middle"))


def _torch_bytes(value):
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _replace_record(path, record):
    """``model.w`` is now what ``record`` makes of it."""
    file = path / "__9_0.distcp"
    file.write_bytes(record)
    _list(path, file.name)

    def change(metadata):
        index = MetadataIndex("model.w", torch.Size([0, 0]))
        metadata.storage_data[index] = _place(metadata, file.name, 0, len(record))

    rewrite_metadata(path, change)


HOSTILE = {
    "a description that executes": _executable_metadata,
    "a byte entry that executes": _executable_bytes,
    "a record that executes": _executable_record,
    "a description that changes a class": _class_that_is_written_to,
    "a relative path out": _pointing_at("../secret.distcp"),
    "an absolute path": _pointing_at(None),
    "a path that is no string": _pointing_at(PosixPath("__0_0.distcp")),
    "a file that the manifest does not know": _unlisted_file,
    "a data file that is a link": _linked("__0_0.distcp"),
    "a state that is a link": _linked("state.json"),
    "a manifest that is a link": _linked("manifest.json"),
    "a description that is a link": _linked(".metadata"),
    "a folder that is a link": _linked("tokenizer"),
    "a data file that is a link to itself": _linked_to_itself("__0_0.distcp"),
    "a state that is a link to itself": _linked_to_itself("state.json"),
    "a manifest that is a link to itself": _linked_to_itself("manifest.json"),
    "a description that is a link to itself": _linked_to_itself(".metadata"),
    "a folder that is a link to itself": _linked_to_itself("tokenizer"),
    "a manifest that lists a name that no file can have": _listed_outside("a\0b"),
    "a manifest that lists a relative path out": _listed_outside("../secret.distcp"),
    "a manifest that lists an absolute path": _listed_outside(None),
    "a manifest without the description": _unlisted(".metadata"),
    "a manifest without the state": _unlisted("state.json"),
    "a manifest with a key of its own": _manifest(lambda body: body.update(extra=1)),
    "a manifest without a key": _manifest(lambda body: body.pop("mesh")),
    "a manifest with a list of files": _manifest(lambda body: body.update(files=[1, 2])),
    "a manifest with an entry without a size": _manifest(lambda body: body["files"]["state.json"].pop("bytes")),
    "a manifest with a size in words": _manifest(lambda body: body["files"]["state.json"].update(bytes="many")),
    "a manifest with a step in words": _manifest(lambda body: body.update(step="eight")),
    "a manifest that nests without end": _deep_manifest,
    "a state that is no JSON": _state("{"),
    "a state that nests without end": _state("[" * 200_000),
    "a state that is a list": _state("[]"),
    "a huge tensor": _huge((1 << 40,), (1 << 40,)),
    "a huge tensor in a small chunk": _huge((1 << 40, 1), (7, 1)),
    "a tensor of a negative size": _huge((-1, -7), (7,)),
    "many tensors in one place": _the_same_bytes_for_many(less=0),
    "many tensors in one place, and less than nothing": _the_same_bytes_for_many(less=-(1 << 40)),
    "a place before the file": _odd_places(-8, 8),
    "a place behind the file": _odd_places(1 << 50, 8),
    "a place in words": _odd_places("here", 8),
    "records that want unpacking": _transformed,
    "a zip bomb": _zip_bomb,
    "a record of another dtype": _record_of(torch.zeros(64, 48, dtype=torch.float64)),
    "a record of another shape": _record_of(torch.zeros(48, 64)),
    "a record of a table": _record_of({"w": torch.zeros(64, 48)}),
    "a record of an unknown byte order": _no_byte_order,
}

_watched: list[str] | None = None


def _note_opened(event: str, arguments: tuple) -> None:
    if _watched is not None and event == "open" and isinstance(arguments[0], (str, bytes)):
        name = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        _watched.append(str(Path(name).resolve()))


sys.addaudithook(_note_opened)


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_checkpoint_executes_nothing_opens_nothing_outside_and_is_named(store, tmp_path, attack):
    global _watched
    marker, outside, path = tmp_path / "executed", tmp_path / "outside", store.folder(8)
    outside.mkdir()
    (outside / "secret.distcp").write_bytes(bytes(4096))
    shutil.copy(outside / "secret.distcp", store.path / "secret.distcp")
    HOSTILE[attack](path, marker, outside)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    _watched = []
    try:
        with pytest.raises(ConfigError, match=r"step_00000008.* cannot be used: ") as refusal:
            _loaded(open_checkpoint(path))
        opened = {name for name in _watched if name.startswith(str(tmp_path.resolve()))}
    finally:
        _watched = None

    assert not marker.exists()
    assert {name for name in opened if not name.startswith(f"{path.resolve()}/")} == set()
    assert PosixPath("a/b").name == "b"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 400_000, "in KiB"
    assert len(str(refusal.value)) < 600
    assert not re.search(r"Traceback|File \"", str(refusal.value))


def test_the_untouched_checkpoint_is_read_and_the_watch_sees_it(store):
    global _watched
    _watched = []
    try:
        assert _loaded(open_checkpoint(store.folder(8))) == {8.0}
        opened = {Path(name).name for name in _watched}
    finally:
        _watched = None

    assert opened >= {"manifest.json", "state.json", ".metadata", "__0_0.distcp", "tokenizer.json"}
