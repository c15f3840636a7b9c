"""Runs whose checkpoints are copied on to a mirror, and that lose the disk on which they were."""

import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fork_server
from faults.objects import Objects
from forge_core.checkpoint.contents import SampleRange
from forge_core.checkpoint.manifest import read_manifest
from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main
from forge_core.train.trainer import Trainer
from forge_plugins_mirror.host_memory.mirror import HostMemory
from forge_plugins_mirror.mirror import Mirror, open_mirror
from forge_plugins_mirror.mirroring import Mirroring
from forge_plugins_mirror.uploader import Uploader
from rank_ports import free_ports

_NAMES = (f"run{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def all_is_well():
    Objects.well()
    yield
    Objects.well()


@pytest.fixture
def wait_for_copier(monkeypatch):
    """A function that waits until the thread of the run has copied all that it was asked for, or has failed to."""
    copiers, start = [], Uploader.start
    monkeypatch.setattr(Uploader, "start", lambda self: (copiers.append(self), start(self)))

    def wait():
        while copiers[-1].is_busy:
            time.sleep(0.01)

    return wait


@pytest.fixture
def waits_for_memory(monkeypatch):
    """No checkpoint is left out because the one before takes longer than three of these steps."""
    wants = HostMemory.wants
    monkeypatch.setattr(HostMemory, "wants", lambda self, step: (self._keeper.wait(), wants(self, step))[1])


@pytest.fixture
def run(shared_tiny, tmp_path, wait_for_copier):
    """Runs the tiny job in this process, under a name of its own, with a mirror. What ``happens`` at a step finds
    copies under way; steps after it begin when there are none, so that the run hears of them while it trains."""
    name = next(_NAMES)

    def start(*arguments, at_step=None, happens=None):
        train_step = Trainer._train_step

        def step(self, microbatches):
            if self.step == at_step:
                happens()
            elif at_step is not None and self.step > at_step:
                wait_for_copier()
            return train_step(self, microbatches)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_train_step", step)
            settings = [f"run.name={name}", f"checkpoint.mirror={start.far}", "checkpoint.interval=2", *arguments]
            return main(["run", str(shared_tiny.config), *settings])

    start.path = shared_tiny.path(name)
    start.store = CheckpointStore(start.path / "checkpoints")
    start.far = f"objects://{tmp_path}/far"
    start.mirror = lambda: open_mirror(f"{start.far}/{name}")
    start.steps_there = lambda: [*start.mirror().checkpoints()]
    return start


def _events(run, *names):
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    return [(event["event"], event["step"]) for event in events if event["event"] in names]


def _starts(run):
    return _events(run, "started", "resumed")[-1]


def _power_lost():
    raise RuntimeError("the power is gone")


def _power_lost_with(run, step):
    """Once its checkpoint is at the mirror."""
    deadline = time.monotonic() + 60
    while step not in run.steps_there():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    _power_lost()


def _lose_disk(run):
    shutil.rmtree(run.path)


def _hang_up():
    Objects.bytes_left = 0


def test_a_run_whose_disk_is_lost_goes_on_from_its_mirror_as_if_nothing_had_happened(run, shared_tiny, capsys):
    assert run("train.steps=6", "scheduler.decay_steps=10") == 0
    assert run.steps_there() == [2, 4, 6]
    assert sorted(_events(run, "mirrored")) == [("mirrored", step) for step in (2, 4, 6)]
    _lose_disk(run)

    assert run("scheduler.decay_steps=10") == 0

    assert "step_00000006: not here; fetching it from objects://" in capsys.readouterr().out
    assert _starts(run) == ("resumed", 6)
    straight = shared_tiny.completed("run.name=straight", "scheduler.decay_steps=10")
    resumed = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in resumed] == [line["loss"] for line in straight[6:]]
    assert run.steps_there() == [2, 4, 6, 8, 10]
    assert run.store.steps() == [6, 8, 10]


def test_a_machine_that_has_an_older_part_of_the_run_takes_the_newer_one_from_the_mirror(run, tmp_path):
    """A job that comes back to a node on which it has been before."""
    assert run("train.steps=4") == 0
    shutil.copytree(run.path, tmp_path / "first node", symlinks=True)
    assert run("train.steps=8") == 0
    _lose_disk(run)
    shutil.copytree(tmp_path / "first node", run.path, symlinks=True)

    assert run() == 0

    assert _starts(run) == ("resumed", 8)


def test_one_that_is_damaged_here_is_fetched_from_the_mirror(run, capsys):
    assert run("train.steps=6") == 0
    file = next(run.store.folder(6).glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])

    assert run() == 0

    assert f"step_00000006: the content of {file.name} is not what was written; fetching it" in capsys.readouterr().out
    assert _starts(run) == ("resumed", 6)


def test_one_that_is_damaged_at_the_mirror_too_is_passed_over(run, capsys):
    assert run("train.steps=6") == 0
    _lose_disk(run)
    far = next(Path(run.far.removeprefix("objects://")).rglob("step_00000006-*/state.json"))
    far.write_text("{" + " " * (far.stat().st_size - 2) + "}")

    assert run() == 0

    said = capsys.readouterr().out
    assert "step_00000006 cannot be used: at objects://" in said
    assert "the content of state.json is not what was written; trying the one before it" in said
    assert _starts(run) == ("resumed", 4)


def test_a_step_that_is_only_at_the_mirror_can_be_gone_back_to_once(run):
    assert run() == 0
    _lose_disk(run)

    assert run("--resume", "4", at_step=10, happens=lambda: _power_lost_with(run, 6)) == 1
    assert _starts(run) == ("resumed", 4)
    assert 10 not in run.steps_there(), "it belongs to what was given up"
    _lose_disk(run)  # and with it the note that going back is done

    assert run("--resume", "4") == 0
    assert _starts(run)[1] in (6, 8)


def test_a_fresh_start_is_not_undone_by_the_mirror(run):
    assert run() == 0

    assert run("--resume", "never", at_step=9, happens=lambda: _power_lost_with(run, 4)) == 1
    assert 10 not in run.steps_there()
    _lose_disk(run)
    assert run("--resume", "never") == 0

    assert _starts(run)[1] in (4, 6, 8)
    assert run.steps_there() == [2, 4, 6, 8, 10]


def test_a_mirror_that_hangs_up_does_not_stop_the_run_and_the_same_command_catches_up(run, capsys):
    assert run(at_step=5, happens=_hang_up) == 0

    said = capsys.readouterr().out
    assert "the other side has hung up; training goes on, and it is tried again after the next save" in said
    assert "the other side has hung up; the same command tries it again" in said
    assert ("mirror_failed", 10) in _events(run, "mirror_failed")
    assert run.store.steps() == [2, 4, 6, 8, 10]
    Objects.bytes_left = None
    assert 10 not in run.steps_there()

    assert run() == 0
    assert run.steps_there() == [2, 4, 6, 8, 10]


def test_what_could_not_be_copied_is_tried_again_after_the_next_save(run, wait_for_copier, monkeypatch):
    def back():
        wait_for_copier()
        Objects.bytes_left = None

    at = {3: _hang_up, 8: back}
    train_step = Trainer._train_step

    def step(self, microbatches):
        at.get(self.step, lambda: None)()
        return train_step(self, microbatches)

    monkeypatch.setattr(Trainer, "_train_step", step)
    assert run() == 0

    assert _events(run, "mirror_failed") != []
    assert run.steps_there() == [2, 4, 6, 8, 10]


def test_a_mirror_without_which_the_run_is_not_to_go_on_ends_it(run, capsys):
    assert run("checkpoint.on_failure=stop", at_step=3, happens=_hang_up) == 1

    assert "the other side has hung up" in capsys.readouterr().err
    assert _events(run, "failed")[0][1] < 10
    Objects.bytes_left = None
    assert run("checkpoint.on_failure=stop") == 0
    assert run.steps_there() == [2, 4, 6, 8, 10]


def test_a_start_without_its_mirror_goes_by_what_is_here_and_not_by_nothing(run, capsys):
    assert run("train.steps=4") == 0
    _hang_up()

    assert run("train.steps=6") == 0
    assert "the other side has hung up; going by the checkpoints that are here" in capsys.readouterr().out
    assert _starts(run) == ("resumed", 4)
    assert run("train.steps=8", "checkpoint.on_failure=stop") == 1

    _lose_disk(run)
    assert run() == 1
    assert "checkpoint.mirror: cannot list its checkpoints at objects://" in capsys.readouterr().err
    assert not run.path.exists()


@pytest.fixture
def removed_between_copies(monkeypatch, wait_for_copier):
    """What is not copied at this moment would be kept, until the next save."""
    removable = Mirroring.removable
    monkeypatch.setattr(Mirroring, "removable", lambda *arguments: (wait_for_copier(), removable(*arguments))[1])


@pytest.mark.usefixtures("removed_between_copies")
def test_what_is_not_copied_yet_is_not_removed_here(run):
    assert run("checkpoint.keep_last=1", at_step=3, happens=_hang_up) == 0
    assert run.store.steps() == [10], "what the mirror would not keep either is not waited for"

    keep = ["checkpoint.keep_last=1", "checkpoint.mirror_keep_last=9", "--resume", "never", "optimizer.lr=2e-3"]
    Objects.bytes_left = None
    assert run(*keep, at_step=5, happens=_hang_up) == 0
    there = set(run.store.steps())
    Objects.bytes_left = None
    assert there | {*run.steps_there()} == {2, 4, 6, 8, 10}
    assert {6, 8, 10} <= there


@pytest.mark.usefixtures("removed_between_copies")
def test_what_is_not_copied_yet_goes_when_the_disk_has_no_room_for_the_next_one(run, monkeypatch, capsys):
    usage = type("usage", (), {"free": 1000, "total": 0, "used": 0})
    monkeypatch.setattr("forge_plugins_mirror.mirroring.shutil", type("S", (), {"disk_usage": lambda path: usage}))
    keep = ["checkpoint.keep_last=1", "checkpoint.mirror_keep_last=9"]
    assert run(*keep, at_step=5, happens=_hang_up) == 0

    assert run.store.steps() == [10]
    assert ("mirror_skipped", 8) in _events(run, "mirror_skipped")
    assert "is removed before it could be copied" in capsys.readouterr().out


def test_an_attempt_on_another_machine_takes_over_and_the_old_one_ends(run, capsys):
    def taken():
        run.mirror().take_over("b" * 12, "", 1 << 60)

    assert run(at_step=5, happens=taken) == 1

    assert "now copies checkpoints to objects://" in capsys.readouterr().err
    assert 10 not in run.steps_there()


def test_a_run_that_goes_back_takes_the_later_ones_from_the_mirror(run, monkeypatch):
    put_aside, at_mirror = [], Mirror.put_aside
    monkeypatch.setattr(Mirror, "put_aside", lambda self, after: (put_aside.append(after), at_mirror(self, after)))
    train_step, once = Trainer._train_step, iter([True])

    def step(self, microbatches):
        counts = train_step(self, microbatches)
        if self.step == 7 and next(once, False):
            position = self.run.loader.position
            self.guard.to_leave_out = SampleRange(5, position - 12, position - 8, 1)
        return counts

    monkeypatch.setattr(Trainer, "_train_step", step)
    assert run() == 0

    assert put_aside == [4]
    assert run.steps_there() == run.store.steps() == [2, 4, 6, 8, 10]
    there = run.mirror().checkpoints()
    assert all(there[step] == read_manifest(run.store.folder(step)) for step in there), "none from before"


@pytest.mark.usefixtures("removed_between_copies")
def test_list_and_verify_know_the_mirror(run, capsys):
    assert run("train.steps=4", "checkpoint.keep_last=1", "checkpoint.mirror_keep_last=9") == 0
    far = next(Path(run.far.removeprefix("objects://")).rglob("step_00000002-*/state.json"))
    capsys.readouterr()

    assert main(["checkpoint", "list", str(run.path), "--json"]) == 0
    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)}
    assert {step: (row["path"] is not None, row["mirror"]) for step, row in rows.items()} == {
        2: (False, "whole"),
        4: (True, "whole"),
    }
    assert main(["checkpoint", "verify", str(run.path), "--mirror"]) == 0
    assert capsys.readouterr().out.count(": whole\n") == 3

    far.write_text("x" + far.read_text()[1:])
    assert main(["checkpoint", "verify", run.mirror().url]) == 2
    assert "step 2: the content of state.json is not what was written" in capsys.readouterr().out

    hint = "; forge checkpoint list shows those at its checkpoint.mirror, and forge checkpoint fetch brings one"
    run.store.remove(run.store.steps())
    for lost in ("has no checkpoints", "is not the directory of a run: it has no checkpoints/"):
        assert main(["checkpoint", "verify", str(run.path)]) == 2
        assert f"{run.path} {lost}{hint}" in capsys.readouterr().err
        shutil.rmtree(run.store.path, ignore_errors=True)
    far.unlink()
    assert main(["checkpoint", "list", str(run.path)]) == 0
    assert "damaged: state.json is missing" in capsys.readouterr().out
    _lose_disk(run)
    assert main(["checkpoint", "list", run.mirror().url]) == 0
    assert "not here" in capsys.readouterr().out.splitlines()[2]


@pytest.fixture
def mirrored(run, capsys):
    """A run of two checkpoints that only its mirror has now."""
    assert run("train.steps=4") == 0
    run.store.remove(run.store.steps())
    capsys.readouterr()
    return run


def test_fetch_brings_the_newest_whole_checkpoint_of_a_mirror_to_where_generate_finds_it(mirrored, capsys):
    run, newest = mirrored, mirrored.store.folder(4)
    assert main(["generate", str(run.path), "--prompt", "def"]) == 2
    assert f"{run.path} holds no checkpoint" in (said := capsys.readouterr().err)
    assert "forge checkpoint fetch" in said

    assert main(["checkpoint", "fetch", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["path"], told["was_here"]) == (4, str(newest), False)
    assert main(["checkpoint", "verify", str(newest)]) == 0
    assert main(["generate", str(run.path), "--prompt", "def", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()

    assert main(["checkpoint", "fetch", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{newest}: was here, and whole\n"
    (newest / "state.json").write_text("{}")
    assert main(["checkpoint", "fetch", str(run.path)]) == 0
    assert f"{newest}: fetched" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(newest)]) == 0
    assert not (run.path / "lease.json").exists()


def test_fetch_from_a_url_fills_a_directory_that_a_run_of_the_same_job_could_have(mirrored, tmp_path, capsys):
    url, here = mirrored.mirror().url, tmp_path / "here"
    assert main(["checkpoint", "fetch", url]) == 2
    assert f"{url} is the mirror of a run; give --to DIR" in capsys.readouterr().err

    assert main(["checkpoint", "fetch", url, "--to", str(here), "--step", "2"]) == 0

    assert CheckpointStore(here / "checkpoints").steps() == [2]
    assert (here / "job.toml").read_text() == (mirrored.path / "job.toml").read_text()
    assert main(["checkpoint", "fetch", url, "--to", str(here)]) == 0
    (here / "checkpoints" / "latest").unlink()
    shutil.rmtree(here / "checkpoints" / "step_00000002")
    assert main(["checkpoint", "fetch", url, "--to", str(here), "--step", "2"]) == 0
    assert not (here / "checkpoints" / "latest").exists(), "it names the newest one, or nothing"


def test_fetch_names_damage_at_the_mirror_and_takes_the_one_before(mirrored, capsys):
    far = next(Path(mirrored.far.removeprefix("objects://")).rglob("step_00000004-*/state.json"))
    far.write_text("x" + far.read_text()[1:])

    assert main(["checkpoint", "fetch", str(mirrored.path), "--step", "4"]) == 2
    said = capsys.readouterr().err
    assert "step 4: the content of state.json is not what was written" in said
    assert "nothing was fetched" in said
    assert main(["checkpoint", "fetch", str(mirrored.path), "--step", "3"]) == 2
    assert "has no checkpoint of step 3; there are 2, 4" in capsys.readouterr().err
    assert mirrored.store.steps() == []

    assert main(["checkpoint", "fetch", str(mirrored.path)]) == 0
    assert mirrored.store.steps() == [2]


def test_fetch_mixes_no_runs(mirrored, shared_tiny, tmp_path, capsys):
    url, steps = mirrored.mirror().url, ("train.steps=4", "checkpoint.interval=2")
    shared_tiny.completed("run.name=other", *steps)
    other = shared_tiny.path("other")
    (tmp_path / "file").touch()
    refused = {
        other: f"{other / 'job.toml'} is not the job that",
        tmp_path / "file": f"cannot write to {tmp_path}/file",
    }
    for to, sentence in refused.items():
        assert main(["checkpoint", "fetch", url, "--to", str(to)]) == 2
        assert sentence in capsys.readouterr().err

    shutil.copytree(other / "checkpoints" / "step_00000004", mirrored.store.folder(4))
    assert main(["checkpoint", "fetch", str(mirrored.path)]) == 2
    assert f"{mirrored.store.folder(4)} is whole, and not what" in capsys.readouterr().err


def test_fetch_takes_a_mirror_on_a_path_as_its_url(run, tmp_path, capsys):
    assert run("train.steps=4", f"checkpoint.mirror={tmp_path / 'near'}") == 0

    assert main(["checkpoint", "fetch", str(tmp_path / "near" / run.path.name), "--to", str(tmp_path / "here")]) == 0

    assert CheckpointStore(tmp_path / "here" / "checkpoints").steps() == [4]


def test_fetch_of_a_run_without_a_mirror_says_so(shared_tiny, capsys):
    shared_tiny.completed("run.name=alone", "train.steps=4")
    capsys.readouterr()

    assert main(["checkpoint", "fetch", str(shared_tiny.path("alone"))]) == 2

    assert "job.toml has no checkpoint.mirror, from which one could be fetched" in capsys.readouterr().err


def test_a_mirror_on_a_path_is_read_like_a_run_and_not_pruned_by_hand(run, tmp_path, capsys):
    keep = ["checkpoint.keep_last=1", "checkpoint.mirror_keep_last=2"]
    assert run("train.steps=6", f"checkpoint.mirror={tmp_path / 'near'}", *keep) == 0
    mirror = str(tmp_path / "near" / run.path.name)
    capsys.readouterr()

    assert main(["checkpoint", "list", mirror, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["damage"], row["kept_by"]) for row in rows] == [
        (4, None, ["keep_last"]),
        (6, None, ["keep_last"]),
    ]
    assert main(["checkpoint", "verify", mirror]) == 0
    assert main(["checkpoint", "prune", mirror, "--keep-last", "1"]) == 2
    assert "is the mirror of a run" in capsys.readouterr().err


def test_a_dry_run_fetches_nothing(run, capsys):
    assert run("train.steps=4") == 0
    _lose_disk(run)

    assert run("--dry-run") == 0

    assert not run.path.exists()
    assert "those at checkpoint.mirror are not fetched" in capsys.readouterr().out


@pytest.mark.parametrize(
    "seconds_a_file", [pytest.param(0, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_several_ranks_wait_for_the_one_that_fetches(tiny, tmp_path, seconds_a_file):
    """By night the fetch is held up for longer than ``run.first_step_timeout``, which they wait in a collective."""
    mirror = f"checkpoint.mirror={tmp_path / 'far'}"
    two = ["--nproc", "2", "train.batch_size=2", "checkpoint.interval=2"]
    tiny.completed(*two, mirror, "train.steps=4")
    shutil.rmtree(tiny.path())
    site = {}
    if seconds_a_file:  # a process that imports this is no fork
        slow = tmp_path / "site" / "sitecustomize.py"
        slow.parent.mkdir()
        slow.write_text(SLOW.format(seconds=seconds_a_file))
        site = {"PYTHONPATH": str(slow.parent)}

    done = fork_server.run(
        tiny.command(*two, mirror, "run.first_step_timeout=15", "train.steps=6"),
        env={**tiny.environment(), **site},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step_00000004" in done.stdout
    assert CheckpointStore(tmp_path / "far/tiny/checkpoints").steps() == [2, 4, 6]


def test_two_nodes_that_do_not_share_the_directory_of_the_run_are_refused(tiny):
    """Rank 1 has a file system of its own there."""
    runs = tiny.path().parent
    runs.mkdir()
    patient = (
        "import forge_core.run.lease as lease; lease.SHOWS_AFTER = 1.0; "
        "from forge_core.__main__ import main; exit(main())"
    )
    command = [sys.executable, "-c", patient, *tiny.command()[3:], "train.batch_size=2"]
    alone = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {runs} && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("no file system may be mounted here")
    world = {**tiny.environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "WORLD_SIZE": "2"}
    processes = [
        fork_server.Popen(
            [*(alone if rank else []), *command],
            env={**world, "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]

    assert [process.returncode for process in processes] == [2, 2], said
    assert "does not see" in said[0]
    assert "a file system that all nodes share" in said[0]
    assert [path.name for path in tiny.path().iterdir()] == []


SLOW = """
import time
from fsspec.implementations.local import LocalFileSystem

get_file = LocalFileSystem.get_file

def slowly(self, *arguments, **more):
    time.sleep({seconds})
    return get_file(self, *arguments, **more)

LocalFileSystem.get_file = slowly
"""


def _several(run, memory):
    memory.mkdir(exist_ok=True)
    there = f'{{name="host_memory", every=3, folder="{memory}"}}, "{run.far}"'
    return ["checkpoint.interval=4", f'checkpoint.mirror={{name="several", mirrors=[{there}]}}']


def test_what_is_in_memory_and_at_a_mirror_survives_the_loss_of_either(
    run, waits_for_memory, shared_tiny, tmp_path, capsys
):
    several = [*_several(run, tmp_path / "memory"), "scheduler.decay_steps=10"]
    assert run(*several, at_step=8, happens=_power_lost) == 1
    assert run(*several, "train.steps=8") == 0
    assert _starts(run) == ("resumed", 6)
    assert run.steps_there() == [4, 8]
    assert [*(tmp_path / "memory").glob("forge-*")] == []
    _lose_disk(run)

    assert run(*several) == 0

    assert "step_00000008: not here; fetching it from" in capsys.readouterr().out
    assert _starts(run) == ("resumed", 8)
    straight = shared_tiny.completed("run.name=straight", "scheduler.decay_steps=10")
    resumed = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in resumed] == [line["loss"] for line in straight[8:]]
    assert run.steps_there() == [4, 8, 10]


def test_a_mirror_that_fails_keeps_the_others_from_nothing(run, waits_for_memory, tmp_path, capsys):
    several = _several(run, tmp_path / "memory")

    assert run(*several, at_step=3, happens=_hang_up) == 0

    assert "cannot copy step_00000004" in capsys.readouterr().out
    assert _events(run, "kept_in_memory") == [("kept_in_memory", 3), ("kept_in_memory", 6), ("kept_in_memory", 9)]
    assert run.store.steps() == [4, 8, 10]
    Objects.well()
    assert run.steps_there() == []
    assert run(*several, "train.steps=12") == 0
    assert run.steps_there() == [4, 8, 10, 12]


@pytest.mark.parametrize(
    ("mirrors", "sentence"),
    [
        ('["/a"]', "expected at least two mirrors, got 1; one is checkpoint.mirror itself"),
        ('["/a", "/b", "/a"]', "mirrors[2]: is mirrors[0] once more"),
        ('[{name="host_memory", every=2}, {name="host_memory", every=3}]', "mirrors[1]: a run has one memory"),
        ('["/a", {name="several", mirrors=["/b", "/c"]}]', "mirrors[1]: is several mirrors in turn"),
        ('["/a", {name="host_mem"}]', "Did you mean 'host_memory'?"),
    ],
)
def test_mirrors_that_are_in_each_others_way_are_refused(shared_tiny, capsys, mirrors, sentence):
    setting = f'checkpoint.mirror={{name="several", mirrors={mirrors}}}'

    assert main(["validate", str(shared_tiny.config), "checkpoint.interval=5", setting]) == 2

    assert sentence in " ".join(capsys.readouterr().err.split())
