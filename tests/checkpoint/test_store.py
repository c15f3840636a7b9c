import errno
import json
import shutil
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.staging import DefaultStager

from forge_core.checkpoint import manifest, saver
from forge_core.checkpoint.manifest import FILE_NAME
from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.state_dict import empty_optimizer_state, model_tensors, named_parameters, optimizer_state
from forge_core.checkpoint.store import CheckpointStore, _share, find_checkpoint, open_checkpoint, whole_problem
from forge_core.distributed.mesh import join_process_group
from forge_core.errors import ConfigError, PluginError


@pytest.fixture(autouse=True)
def process_group():
    join_process_group(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def snapshot(step, tensors, state=None):
    return Snapshot(
        step=step,
        tokens=0,
        tensors=tensors,
        state=state or {"step": step},
        mesh={"pp": 1},
        versions={},
        metrics={},
        write_more=lambda folder: {"more": (folder / "job.toml").write_text("x = 1\n")},
    )


def _save(store, step, tensors=None, state=None, *, background=False):
    saver = Saver(store, torch.device("cpu"), background=background, timeout=60, may_commit=lambda: None)
    saver.save(snapshot(step, tensors or {"model.w": torch.full((3,), float(step))}, state))
    saved = saver.finish()
    saver.close()
    assert saved.error is None
    return saved.path


def _quiet(_):
    raise AssertionError("nothing to report")


def test_what_is_saved_is_read_back(store):
    _save(store, 7)

    checkpoint = store.newest(_quiet)
    read = {"model.w": torch.zeros(3)}
    checkpoint.load(read)

    assert checkpoint.step == 7
    assert checkpoint.state() == {"step": 7, "more": 6}
    assert read["model.w"].tolist() == [7, 7, 7]


def test_where_tensors_lie_is_not_sent_to_all_ranks_when_they_are_saved(store, monkeypatch):
    """It grows with tensors times ranks: 37 MB for an 8B model on 256 ranks, which each of them would read."""
    sent = []
    save = saver.save
    monkeypatch.setattr(saver, "save", lambda *args, **keywords: sent.append(save(*args, **keywords)))

    _save(store, 7, {f"model.{n}": torch.zeros(3) for n in range(100)})

    assert not sent[0].state_dict_metadata
    assert not sent[0].storage_data
    assert len(store.newest(_quiet).saved_tensors()) == 100


def test_a_record_is_looked_at_without_what_lies_before_it(store, monkeypatch):
    """Newer Pythons refuse archives with other bytes before them, and a file of a checkpoint has many in a row."""
    _save(store, 1, {"model.w": torch.ones(3), "model.v": torch.ones(5)})
    seen = []

    class Strict(zipfile.ZipFile):
        def __init__(self, file):
            file.seek(0)
            seen.append(file.read(4))
            super().__init__(file)

    monkeypatch.setattr("forge_core.checkpoint.stored_tensor.zipfile.ZipFile", Strict)
    checkpoint = store.newest(_quiet)
    for key in checkpoint.saved_tensors():
        checkpoint.read(key)

    assert len(seen) == 2
    assert set(seen) == {b"PK\x03\x04"}


def test_a_second_one_is_saved_where_torch_has_closed_what_copies(store, monkeypatch):
    """As torch 2.11 does after each copy."""
    stage = DefaultStager._stage

    def stage_and_close(self, tensors, **options):
        staged = stage(self, tensors, **options)
        self._state_dict_stager.close()
        return staged

    monkeypatch.setattr(DefaultStager, "_stage", stage_and_close)
    saver = Saver(store, torch.device("cpu"), background=True, timeout=60, may_commit=lambda: None)
    for step in (1, 2):
        saver.save(snapshot(step, {"model.w": torch.full((3,), float(step))}))
        assert saver.finish().error is None
    saver.close()

    assert store.newest(_quiet).read("model.w").tolist() == [2, 2, 2]


def test_latest_points_at_the_last_one_saved(store):
    _save(store, 7)
    _save(store, 8)

    assert (store.path / "latest").readlink().name == "step_00000008"
    assert find_checkpoint(store.path / "latest", _quiet).path.name == "step_00000008"
    assert find_checkpoint(store.path.parent, _quiet).step == 8


def test_nothing_but_committed_checkpoints_is_left_in_the_folder(store):
    _save(store, 7)

    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step_00000007"]


def test_a_half_written_one_is_not_seen_and_is_removed(store):
    _save(store, 7)
    for attempt in ("a", "b"):
        store.unfinished_folder(8, attempt).mkdir()

    assert store.newest(_quiet).step == 7
    store.remove_unfinished()
    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step_00000007"]


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def _link_to_itself(file):
    file.unlink()
    file.symlink_to(file.name)


def _rewrite(path, old, new):
    manifest = path / FILE_NAME
    assert old in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: _cut(next(path.glob("*.distcp"))), "the manifest says"),
        (lambda path: _flip(next(path.glob("*.distcp"))), "is not what was written"),
        (lambda path: _flip(path / ".metadata"), "is not what was written"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "not a manifest"),
        (lambda path: (path / "manifest.json").unlink(), "cannot be read"),
        (lambda path: _rewrite(path, '"step": 8', '"step": 9'), "manifest.json is not what was written"),
        (lambda path: _rewrite(path, "state.json", "../state.json"), "is not what was written"),
        (lambda path: _link_to_itself(path / "state.json"), "state.json is not a file of its own"),
        (lambda path: _link_to_itself(path / "manifest.json"), "manifest.json is not a file of its own"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(store, harm, said):
    _save(store, 7)
    harm(_save(store, 8))
    reported = []

    found = store.newest(reported.append)

    assert found.step == 7
    assert said in reported[0]
    with pytest.raises(ConfigError, match="step_00000008"):
        find_checkpoint(store.path / "step_00000008", _quiet)


def test_a_link_to_itself_is_no_checkpoint(store):
    _save(store, 7)
    store.folder(8).symlink_to(store.folder(8).name)

    assert store.newest(_quiet).step == 7
    with pytest.raises(ConfigError, match=r"step_00000008 cannot be used: "):
        find_checkpoint(store.folder(8), _quiet)


def test_one_that_cannot_be_looked_at_is_not_passed_over_in_silence(store, monkeypatch):
    _save(store, 7)
    _save(store, 8)
    stat = Path.stat

    def denied(path, **more):
        if path == store.folder(8):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", denied)

    assert store.steps() == [7, 8]


def test_one_that_has_been_given_the_name_of_another_step_is_not_believed(store):
    _save(store, 7)
    shutil.copytree(_save(store, 8), store.folder(99))
    reported = []

    assert store.newest(reported.append).step == 8
    assert len(reported) == 1
    assert "step_00000099 cannot be used: manifest.json says that it is of step 8" in reported[0]
    with pytest.raises(ConfigError, match="it is of step 8"):
        store.at(99, _quiet)
    shutil.copytree(store.folder(8), store.path / "kept_for_the_paper")  # which says nothing of a step
    assert find_checkpoint(store.path / "kept_for_the_paper", _quiet).step == 8


def test_a_manifest_of_any_depth_is_named_as_damaged():
    for depth in range(500, 1000):
        with pytest.raises(manifest.DamagedError):
            manifest.parse_manifest(b'{"format": 2, "step": ' + b"[" * depth + b"]" * depth + b"}")


def test_a_format_of_the_future_is_not_guessed_at(store):
    path = _save(store, 7)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))

    assert "format 99" in whole_problem(path)


def test_one_of_a_later_version_is_not_passed_over(store, monkeypatch):
    _save(store, 7)
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT", 99)
        path = _save(store, 8)

    with pytest.raises(ConfigError, match=r"step_00000008 was written by a later version of Forge: .* format 99"):
        store.newest(_quiet)

    _rewrite(path, '"step": 8', '"step": 9')  # then it is damage, which may have made the 99 as well
    assert store.newest(lambda line: None).step == 7


def test_a_damaged_one_can_be_written_again_and_is_not_lost(store):
    _cut(next(_save(store, 7).glob("*.distcp")))

    _save(store, 7)

    assert store.newest(_quiet).step == 7
    assert [path.name for path in (store.path.parent / "checkpoints.aside").iterdir()] == ["step_00000007.1"]


def test_what_is_trained_on_while_it_is_written_does_not_get_into_the_file(store):
    weight = torch.full((1000, 1000), 1.0)
    saver = Saver(store, torch.device("cpu"), background=True, timeout=60, may_commit=lambda: None)
    snapshot = Snapshot(
        step=1,
        tokens=0,
        tensors={"model.w": weight},
        state={},
        mesh={"pp": 1},
        versions={},
        metrics={},
        write_more=lambda folder: {},
    )

    saver.save(snapshot)
    saver.wait_until_copied()
    weight.fill_(2.0)
    saved = saver.finish()
    saver.close()

    read = {"model.w": torch.zeros(1000, 1000)}
    open_checkpoint(saved.path).load(read)
    assert read["model.w"].unique().tolist() == [1.0]


def test_removed_ones_are_gone_and_the_others_stay(store):
    for step in (1, 2, 3):
        _save(store, step)

    store.remove([1, 2])

    assert store.steps() == [3]
    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step_00000003"]


def test_files_go_while_training_goes_on_and_are_gone_before_the_next_save(store, monkeypatch):
    for step in (1, 2, 3):
        _save(store, step)
    may_go, remove_tree = threading.Event(), shutil.rmtree

    def slow(path, **options):
        assert not path.name.endswith(".removed") or may_go.wait(30)
        remove_tree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    store.begin_to_remove([1, 2])

    assert store.steps() == [3]
    assert len(list(store.path.glob(".step_*.removed"))) == 2
    threading.Timer(0.5, may_go.set).start()
    _save(store, 4)
    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step_00000003", "step_00000004"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_file_is_read_by_one_rank_and_each_rank_reads_about_as_much(ranks):
    files = {f"{i:02}": {"bytes": size} for i, size in enumerate([0, 7, 100, 3, 90, 40, 40, 1, 60, 0])}

    shares = [_share(files, rank, ranks) for rank in range(ranks)]

    assert sorted(name for share in shares for name in share) == sorted(files)
    most = max(sum(one["bytes"] for one in share.values()) for share in shares)
    assert most <= sum(one["bytes"] for one in files.values()) / ranks + 100


def test_the_newest_before_a_step_is_not_that_of_the_step(store):
    for step in (1, 2, 3):
        _save(store, step)

    assert store.newest(_quiet, before=3).step == 2
    assert store.newest(_quiet, before=1) is None


def test_later_ones_are_put_aside_for_a_run_that_goes_back(store):
    for step in (1, 2, 3):
        _save(store, step)

    aside = store.put_aside(1)

    assert store.steps() == [1]
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000002.1", "step_00000003.1"]
    assert open_checkpoint(aside / "step_00000002.1").step == 2


def test_a_step_that_is_not_there_is_named_with_those_that_are(store):
    _save(store, 7)

    with pytest.raises(ConfigError, match="no checkpoint of step 8; there are 7"):
        store.at(8, _quiet)


def test_checkpoints_none_of_which_is_whole_are_not_taken_for_a_fresh_start(store):
    _cut(next(_save(store, 7).glob("*.distcp")))
    _cut(next(_save(store, 8).glob("*.distcp")))

    with pytest.raises(ConfigError, match=r"(?s)none of the checkpoints.*step_00000008.*step_00000007"):
        store.newest(lambda line: None)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"model.w": torch.zeros(4)}, "shape"),
        ({"model.w": torch.zeros(3, dtype=torch.bfloat16)}, "dtype"),
        ({"model.v": torch.zeros(3)}, "model.v is not in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(store, wanted, said):
    _save(store, 7)

    with pytest.raises(ConfigError, match=said):
        store.newest(_quiet).load(wanted)


class TestOptimizerState:
    def _trained(self, optimizer_class, steps, model=None, optimizer=None):
        torch.manual_seed(0)
        model = model or nn.Linear(4, 3)
        optimizer = optimizer or optimizer_class(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    @pytest.mark.parametrize(
        "optimizer_class",
        [
            lambda p: torch.optim.AdamW(p, fused=True),
            lambda p: torch.optim.AdamW(p, foreach=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.ASGD(p),  # numbers and tensors of other shapes
            lambda p: torch.optim.Adafactor(p),
        ],
    )
    def test_it_goes_into_a_fresh_optimizer_without_a_step_and_continues_bit_for_bit(self, store, optimizer_class):
        model, optimizer = self._trained(optimizer_class, 3)
        tensors, facts = optimizer_state(optimizer, named_parameters([model]))
        saved_model = {
            key: tensor.detach().clone() for key, tensor in model_tensors(named_parameters([model]), [model]).items()
        }
        _save(store, 3, {**saved_model, **tensors}, json.loads(json.dumps(facts)))
        self._trained(optimizer_class, 3, model, optimizer)

        again = nn.Linear(4, 3)
        fresh = optimizer_class(again.parameters())
        checkpoint = store.newest(_quiet)
        read = empty_optimizer_state(fresh, named_parameters([again]), checkpoint.saved_tensors(), checkpoint.state())
        checkpoint.load({**model_tensors(named_parameters([again]), [again]), **read})
        self._trained(optimizer_class, 3, again, fresh)

        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    def test_state_that_is_not_on_the_parameter_s_device_comes_back_on_the_host(self):
        parameters = {"w": nn.Parameter(torch.empty(2, 3, device="meta"))}
        trained, fresh = (torch.optim.SGD(parameters.values()) for _ in range(2))
        trained.state[parameters["w"]] = {"step": torch.ones(()), "mean": torch.ones(2, 3, device="meta")}
        tensors, facts = optimizer_state(trained, parameters)
        saved = {
            key: SimpleNamespace(size=one.shape, properties=SimpleNamespace(dtype=one.dtype))
            for key, one in tensors.items()
        }

        read = empty_optimizer_state(fresh, parameters, saved, facts)

        devices = {key: one.device.type for key, one in read.items()}
        assert devices == {"optimizer.w.step": "cpu", "optimizer.w.mean": "meta"}

    def test_state_that_cannot_be_saved_is_refused_by_name(self):
        model, optimizer = self._trained(torch.optim.SGD, 1)
        optimizer.state[model.weight]["history"] = [1, 2]

        with pytest.raises(PluginError, match="list as state 'history' of weight"):
            optimizer_state(optimizer, named_parameters([model]))


def test_a_tied_parameter_and_a_passing_buffer_are_not_saved_twice():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("passing", torch.zeros(1), persistent=False)

    assert model_tensors(named_parameters([model]), [model]).keys() == {"model.a.weight", "model.kept"}


def test_a_buffer_of_a_block_that_is_recomputed_is_saved_like_any_other():
    block = nn.Linear(2, 2)
    block.register_buffer("bias_of_router", torch.zeros(1))
    model = nn.ModuleDict({"plain": nn.Linear(2, 2), "wrapped": checkpoint_wrapper(block)})

    assert "model.wrapped.bias_of_router" in model_tensors(named_parameters([model]), [model])
