"""``checkpoint.frozen = "once"``: frozen tensors are on the disk once, and each checkpoint is whole by itself."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch

from forge_core.checkpoint import frozen_files
from forge_core.checkpoint.frozen_files import FrozenFiles
from forge_core.checkpoint.manifest import read_manifest
from forge_core.checkpoint.store import CheckpointStore, open_checkpoint, whole_problem
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_plugins_weights.loading import load_model

PHASES = 'phases=[{at=1, train=["blocks.1.*", "head.*", "norm.*"]}, {at=6, train=["blocks.1.*"]}]'
SHORT = PHASES.partition(", {at=6")[0] + "]"
"""The same, of a run that has not come that far."""
ONCE = (PHASES, 'checkpoint.frozen="once"', "checkpoint.interval=2")
FILE = "frozen/__0_0.distcp"
_NAMES = (f"once{number}" for number in itertools.count())


@pytest.fixture
def run(shared_tiny):
    """Runs the tiny job under a name of its own; ``run.path`` and ``run.store`` are where its files are."""
    name = next(_NAMES)

    def start(*arguments):
        return shared_tiny.completed(f"run.name={name}", *ONCE, *arguments)

    start.name = name
    start.path = shared_tiny.path(name)
    start.store = CheckpointStore(start.path / "checkpoints")
    return start


def tensors(folder):
    found = open_checkpoint(folder)
    return {key: found.read(key) for key in found.saved_tensors()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def places(store):
    """Of the frozen tensors of each checkpoint, on the disk."""
    return [(store.folder(step) / FILE).stat().st_ino for step in store.steps()]


def test_frozen_tensors_are_on_the_disk_once_and_every_checkpoint_has_them(run, shared_tiny):
    run()
    shared_tiny.completed("run.name=whole", *ONCE, 'checkpoint.frozen="whole"')

    assert run.store.steps() == [2, 4, 6, 8, 10]
    assert len(set(places(run.store))) == 1
    assert (run.store.folder(2) / FILE).stat().st_nlink == 5
    for step in run.store.steps():
        folder = run.store.folder(step)
        assert whole_problem(folder) is None
        assert equal(tensors(folder), tensors(shared_tiny.path("whole") / "checkpoints" / folder.name))


def test_any_checkpoint_can_be_removed_and_the_newest_alone_goes_on(run, training_values, shared_tiny):
    straight = shared_tiny.completed("run.name=straight", PHASES, "checkpoint.interval=2")
    run("checkpoint.keep_last=1", "train.steps=6", "scheduler.decay_steps=8")

    assert run.store.steps() == [6]
    while [*run.store.unfinished(".step_*.removed")]:  # a thread deletes what has been removed
        time.sleep(0.01)
    assert (run.store.folder(6) / FILE).stat().st_nlink == 1
    before = places(run.store)
    lines = run("checkpoint.keep_last=2", "scheduler.decay_steps=8")
    assert set(places(run.store)) == set(before)
    assert training_values(lines) == training_values(straight)
    assert load_model(open_checkpoint(run.store.folder(10)), discover, torch.device("cpu"), None).model


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")], ids=["one rank", "two ranks"])
def test_a_run_goes_on_from_it_in_another_layout(run, shared_tiny, ranks):
    settings = () if ranks else ("--nproc", "2", "train.batch_size=2")
    if settings:
        shared_tiny.completed(*settings, f"run.name={run.name}", *ONCE, "train.steps=6", "scheduler.decay_steps=8")
    else:
        run("train.steps=6", "scheduler.decay_steps=8")
    shared_tiny.completed(
        *ranks, f"run.name={run.name}", *ONCE, f"train.batch_size={2 if ranks else 4}", "scheduler.decay_steps=8"
    )

    assert len(set(places(run.store))) == 1
    first, last = tensors(run.store.folder(2)), tensors(run.store.folder(10))
    assert torch.equal(first["model.embed.weight"], last["model.embed.weight"])
    assert whole_problem(run.store.folder(10)) is None


def test_another_way_to_keep_them_may_be_chosen_at_any_start(run):
    run(SHORT, "train.steps=4", 'checkpoint.frozen="whole"', "scheduler.decay_steps=8")
    run("train.steps=8", "scheduler.decay_steps=8")
    assert not (run.store.folder(4) / "frozen").exists()
    assert len({(run.store.folder(step) / FILE).stat().st_ino for step in (6, 8)}) == 1
    run('checkpoint.frozen="whole"', "scheduler.decay_steps=8")
    assert not (run.store.folder(10) / "frozen").exists()
    assert torch.equal(*(tensors(run.store.folder(step))["model.embed.weight"] for step in (2, 10)))


def test_parameters_that_a_changed_phase_thaws_are_written_from_then_on(run):
    run(SHORT, "train.steps=4", "scheduler.decay_steps=8")
    run(PHASES.replace('at=6, train=["blocks.1.*"]', 'at=8, train=["embed.*"]'), "scheduler.decay_steps=8")

    before, after = tensors(run.store.folder(4)), tensors(run.store.folder(10))
    assert not torch.equal(before["model.embed.weight"], after["model.embed.weight"])
    assert torch.equal(before["model.blocks.0.attention.q.weight"], after["model.blocks.0.attention.q.weight"])
    assert len(set(places(run.store))) == 2


def test_damage_is_told_of_every_checkpoint_that_has_the_file(run, capsys):
    run(SHORT, "train.steps=4", "scheduler.decay_steps=8")
    file = run.store.folder(2) / FILE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    assert main(["checkpoint", "verify", str(run.path)]) == 2
    said = capsys.readouterr().out
    assert said.count(f"the content of {FILE} is not what was written") == 2

    (run.store.folder(4) / FILE).unlink()
    assert main(["checkpoint", "verify", str(run.store.folder(4))]) == 2
    assert f"{FILE} is missing" in capsys.readouterr().out


def test_a_mirror_has_them_in_each_and_gives_them_back(run, tmp_path):
    mirror = f"checkpoint.mirror={tmp_path / 'far'}"
    run("train.steps=6", mirror, "scheduler.decay_steps=8")
    far = CheckpointStore(tmp_path / "far" / run.name / "checkpoints")
    assert [whole_problem(far.folder(step)) for step in far.steps()] == [None] * 3
    shutil.rmtree(run.path)

    run(mirror, "scheduler.decay_steps=8")
    assert run.store.steps() == [6, 8, 10]
    assert len(set(places(run.store))) == 1
    assert equal(tensors(far.folder(10)), tensors(run.store.folder(10)))


def test_commands_show_what_is_shared(run, capsys):
    run(SHORT, "train.steps=4", "scheduler.decay_steps=8")
    capsys.readouterr()
    assert main(["checkpoint", "show", str(run.path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)

    assert facts["shared_bytes"] == (run.store.folder(4) / FILE).stat().st_size
    assert facts["tensors"]["model"]["tensors"] == len([key for key in tensors(run.store.folder(4)) if "model." in key])
    assert main(["checkpoint", "show", str(run.path)]) == 0
    assert "shared with other checkpoints" in capsys.readouterr().out


def test_it_is_refused_where_nothing_is_frozen_all_the_time(shared_tiny, capsys):
    thaws = 'phases=[{at=1, train=["head.*"]}, {at=5}]'
    for phases in (thaws, 'phases=[{at=2, train=["head.*"]}]', "phases=[]"):
        settings = ["run.name=refused", phases, 'checkpoint.frozen="once"']
        assert main(["run", str(shared_tiny.config), *settings]) == 2
        assert 'checkpoint.frozen: "once" has no effect' in capsys.readouterr().err


def test_it_is_refused_on_a_disk_without_links(shared_tiny, capsys, monkeypatch):
    def link(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(frozen_files.os, "link", link)
    assert main(["run", str(shared_tiny.config), "run.name=unlinked", *ONCE]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert 'does not take (Operation not permitted); set it to "whole"' in said
    assert not shared_tiny.path("unlinked").exists()


def test_files_that_cannot_be_had_any_more_are_written_again(run, tmp_path):
    run(SHORT, "train.steps=4", "scheduler.decay_steps=8")
    folder = run.store.folder(2)
    keys = {key for key in tensors(folder) if key.startswith(("model.embed.", "model.blocks.0."))}
    files = FrozenFiles(tmp_path, folder)

    assert files.take(keys, {})
    assert not files.take(keys - {"model.embed.weight"}, {})
    assert not files.take(keys, {"blocks.0.": 2})
    shutil.rmtree(folder / "frozen")
    assert not files.take(keys, {})


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_leaves_whole_checkpoints_and_goes_on(run, shared_tiny):
    command = shared_tiny.command(
        f"run.name={run.name}", *ONCE, "train.steps=100000", "checkpoint.interval=3", "checkpoint.keep_last=3"
    )
    newest = 0
    for seconds in (0.05, 0.21, 0.33):
        process = subprocess.Popen(
            command, env=shared_tiny.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while max(run.store.steps(), default=0) < newest + 9 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps = run.store.steps()
        assert len(steps) >= 2
        assert steps[-1] > newest
        assert [whole_problem(run.store.folder(step)) for step in steps] == [None] * len(steps)
        newest = steps[-1]
    assert len(set(places(run.store))) == 1
    assert read_manifest(run.store.folder(newest)).files.keys() >= {FILE}
