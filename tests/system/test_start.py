"""``--resume``: where a run starts from, and that it does not lose its work by being started again."""

import json
import subprocess
import sys

import pytest

from forge_core.cli import main
from forge_core.train.trainer import Trainer


@pytest.fixture(scope="module")
def complete(shared_tiny):
    """Checkpoints at 2, 4, … 10."""
    shared_tiny.completed("run.name=complete", "checkpoint.interval=2")
    return shared_tiny


@pytest.fixture
def run(complete, tmp_path):
    """The same job in a directory of its own, with those checkpoints."""
    import shutil

    shutil.copytree(complete.path("complete"), tmp_path / "runs" / "complete", symlinks=True)

    def start(*arguments):
        settings = [f"run.dir={tmp_path / 'runs'}", "run.name=complete", "checkpoint.interval=2"]
        return main(["run", str(complete.config), *settings, *arguments])

    start.path = tmp_path / "runs" / "complete"
    return start


def _starts(run):
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["event"] in ("started", "resumed")]


def _steps(run):
    return [int(path.name.removeprefix("step_")) for path in sorted((run.path / "checkpoints").glob("step_*"))]


def _crash_at(step, monkeypatch):
    train_step = Trainer._train_step

    def crashing(self, microbatches):
        if self.step == step:
            raise RuntimeError("the power is gone")
        return train_step(self, microbatches)

    monkeypatch.setattr(Trainer, "_train_step", crashing)


@pytest.mark.parametrize(("resume", "first"), [("4", 4), ("never", 0)])
def test_going_back_is_done_once_however_often_the_command_is_repeated(run, resume, first, capsys):
    with pytest.MonkeyPatch.context() as monkeypatch:
        _crash_at(first + 4, monkeypatch)
        assert run("--resume", resume) == 1
    assert _steps(run)[-1] == first + 2  # the later ones are aside

    assert run("--resume", resume) == 0

    assert _starts(run) == [0, first, first + 2]
    printed = capsys.readouterr().out
    assert "was done when this job was last started" in printed
    assert "damaged" not in printed
    assert _steps(run) == [2, 4, 6, 8, 10]
    aside = run.path / "checkpoints.aside"
    assert sorted(path.name for path in aside.iterdir())[-1] == "step_00000010.1"


def test_going_back_is_done_again_for_another_job(run):
    assert run("--resume", "4") == 0

    assert run("--resume", "4", "optimizer.lr=5e-3") == 0

    assert _starts(run) == [0, 4, 4]
    assert len(list((run.path / "checkpoints.aside").glob("step_00000010.*"))) == 2


def test_going_back_is_done_again_after_a_start_without_it(run):
    assert run("--resume", "4") == 0
    assert run("train.steps=12") == 0
    assert run("--resume", "4") == 0

    assert _starts(run) == [0, 4, 10, 4]


def test_power_lost_between_putting_aside_and_the_first_step_does_not_undo_it(run, monkeypatch):
    from forge_core.run.directory import RunDirectory

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "open", lambda *given: (_ for _ in ()).throw(OSError("the power is gone")))
        assert run("--resume", "4") == 1

    assert run("--resume", "4") == 0

    assert _starts(run) == [0, 4]


def test_a_path_is_where_a_new_run_begins_and_nothing_more(complete, run, capsys):
    other = complete.path("complete") / "checkpoints" / "step_00000006"
    with pytest.MonkeyPatch.context() as monkeypatch:
        _crash_at(9, monkeypatch)
        assert run("run.name=branch", "--resume", str(other)) == 1
    for place in (other, other.parent.parent):
        assert run("run.name=branch", "--resume", str(place)) == 0
        assert "is where this run began; it goes on from step_" in capsys.readouterr().out

    run.path = run.path.parent / "branch"
    assert _starts(run) == [6, 8]
    assert _steps(run) == [8, 10]


def test_a_path_to_the_last_step_of_another_run_leaves_nothing_to_train_and_is_refused(complete, run, capfd):
    """It was said that the new run has all its steps, with another model too, and nothing of it was there."""
    last = complete.path("complete") / "checkpoints" / "step_00000010"
    assert run("run.name=elsewhere", "--resume", str(last)) == 2
    assert f"train.steps = 10, but {last} is at step 10 already" in capfd.readouterr().err
    assert run("run.name=elsewhere", "--resume", str(last), "model.n_layers=1") == 2
    assert "model.n_layers: 2 -> 1" in capfd.readouterr().err
    assert not (run.path.parent / "elsewhere").exists()


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("3", "no checkpoint of step 3; there are 2, 4, 6, 8, 10"),
        ("nwver", "expected auto, never, the step of one of this run's checkpoints, or the path"),
    ],
)
def test_what_is_not_there_is_named(run, resume, said, capfd):
    if not resume.isdecimal():
        for path in (run.path / "checkpoints").iterdir():
            path.unlink() if path.is_symlink() else path.rename(run.path / path.name)

    assert run("--resume", resume) == 2

    assert said in capfd.readouterr().err


@pytest.mark.parametrize("start", ["again", "prune"])
def test_what_a_kill_at_the_end_of_a_run_leaves_is_removed_by_whatever_is_started_next(run, start):
    gone, half = (run.path / "checkpoints" / name for name in (".step_00000004.removed", ".step_00000010.ab.partial"))
    for folder in (gone, half):
        folder.mkdir()
        (folder / "state.json").write_text("{}")
    take = "import os, pathlib, sys; from forge_core.run.lease import Lease; Lease(pathlib.Path(sys.argv[1]), print)"
    subprocess.run([sys.executable, "-c", f"{take}; os._exit(9)", run.path], timeout=100)
    assert (run.path / "lease.json").exists()

    assert (run() if start == "again" else main(["checkpoint", "prune", str(run.path), "--keep-last", "9"])) == 0

    assert _steps(run) == [2, 4, 6, 8, 10]
    assert [path for path in (gone, half, run.path / "lease.json") if path.exists()] == []
