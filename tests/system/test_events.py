"""``events.jsonl``: what happened to a run, for people and programs, as the documentation has it."""

import ast
import json
import os
import re
import signal
import sys
from datetime import datetime
from pathlib import Path

import pytest

from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main
from forge_core.run import signals
from forge_core.run.directory import ENDS
from forge_core.run.trackers import Trackers
from forge_core.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/running.md"


def documented():
    """The fields of each event in the table of the page, besides those that all have."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Events\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    return {event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows}


@pytest.fixture
def run(tiny):
    """Runs the tiny job in this process; gives back its exit code and the events that this start has added."""

    def start(*arguments, at_step=None, happens=None):
        path = tiny.path() / "events.jsonl"
        before = len(path.read_text().splitlines()) if path.exists() else 0
        train_step = Trainer._train_step

        def step(self, microbatches):
            if self.step == at_step:
                happens()
            return train_step(self, microbatches)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_train_step", step)
            try:
                code = main(["run", str(tiny.config), *arguments])
            except SystemExit as left:
                code = left.code
        events = [json.loads(line) for line in path.read_text().splitlines()[before:]]
        for event in events:
            assert datetime.fromisoformat(event["time"]).utcoffset().total_seconds() == 0
            assert event.keys() - {"time", "event", "step"} == documented()[event["event"]], event
        return code, events

    start.store = CheckpointStore(tiny.path() / "checkpoints")
    return start


def told(events):
    return [(event["event"], event["step"]) for event in events]


def fail():
    raise RuntimeError("the power is gone")


@pytest.mark.parametrize("told", [0, 3, None, "enough"])
def test_a_component_that_exits_does_not_end_the_run_well(run, capsys, told):
    code, events = run("checkpoint.interval=0", at_step=3, happens=lambda: sys.exit(told))

    assert code == 1
    assert (events[-1]["event"], events[-1]["exit_code"]) == ("failed", 1)
    assert (
        f"error: the process was told to exit ({told}) before the run had ended: {__file__}:" in capsys.readouterr().err
    )


def test_a_component_that_exits_is_named_where_a_library_has_put_itself_in_place_of_sys_exit(run, capsys, monkeypatch):
    """As wandb does."""
    of_python = sys.exit

    def exit(code):  # noqa: A001  # its name is the point
        of_python(code)

    monkeypatch.setattr(sys, "exit", exit)
    code, _ = run("checkpoint.interval=0", at_step=3, happens=lambda: sys.exit(0))

    assert code == 1
    assert f"before the run had ended: {__file__}:" in (said := capsys.readouterr().err)
    assert ", in <lambda>" in said


def test_the_story_of_a_run_that_is_stopped_fails_and_comes_back(run, capsys):
    code, events = run("checkpoint.interval=4", at_step=5, happens=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert code == 3
    assert told(events) == [("started", 0), ("saved", 4), ("saved", 5), ("preempted", 5)]
    assert events[-1]["reason"] == "SIGTERM"
    first = events[0]["attempt"]

    code, events = run("checkpoint.interval=4", at_step=7, happens=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert code == 3
    assert told(events) == [("resumed", 5), ("saved", 7), ("stopped", 7)]
    assert events[-1]["reason"] == "SIGINT"
    assert events[0]["attempt"] != first
    assert events[0]["checkpoint"].endswith("step_00000005")

    code, events = run("checkpoint.interval=4", at_step=9, happens=fail)
    assert code == 1
    assert told(events) == [("resumed", 7), ("saved", 8), ("failed", 9)]
    assert (events[-1]["error"], events[-1]["exit_code"]) == ("RuntimeError: the power is gone", 1)

    (run.store.folder(8) / "state.json").unlink()
    capsys.readouterr()
    code, events = run()
    assert code == 0
    assert told(events) == [("resumed", 7), ("saved", 10), ("completed", 10)]
    assert events[0]["passed_over"] == [8]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny: ")]
    assert re.fullmatch(
        r"tiny: resumed from step_00000007, as those of steps 8 are damaged; [\d,]+ parameters, fp32 on cpu, "
        r"one process; 10 steps; files in .*",
        line,
    )


def test_a_start_that_is_told_has_its_end_told_however_early_it_is_stopped(run, tiny, monkeypatch):
    """Its trackers may take half a minute to begin, and close what they have begun."""
    build = Trackers.__init__

    def told_to_stop(self, *given, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        build(self, *given, **options)

    monkeypatch.setattr(Trackers, "__init__", told_to_stop)
    unheard = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody heeds it yet"))
    try:
        code, events = run()
    finally:
        signal.signal(signal.SIGTERM, unheard)

    assert code == 3
    assert told(events) == [("started", 0), ("saved", 1), ("preempted", 1)]
    assert not (tiny.path() / "lease.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_comes_again_changes_nothing(run, monkeypatch, number):
    monkeypatch.setattr(signals, "is_in_foreground", lambda: False)  # wherever these tests are run

    code, events = run(at_step=3, happens=lambda: [os.kill(os.getpid(), number) for _ in range(5)])

    assert code == 3
    assert events[-1]["event"] == ("stopped" if number == signal.SIGINT else "preempted")
    assert (events[-1]["step"], events[-1]["reason"]) == (3, number.name)


def test_a_second_ctrl_c_leaves_at_once(run, monkeypatch):
    monkeypatch.setattr(signals, "is_in_foreground", lambda: True)

    code, events = run(at_step=3, happens=lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])

    assert code == 130
    assert (events[-1]["event"], events[-1]["exit_code"]) == ("failed", 130)
    assert run.store.steps() == []


@pytest.mark.parametrize(("at_step", "end"), [(None, ("completed", 10)), (3, ("stopped", 3))])
def test_who_does_not_wait_for_trackers_to_close_has_the_end_told(run, monkeypatch, at_step, end):
    """Ctrl-C on a terminal, when all is saved."""
    monkeypatch.setattr(signals, "is_in_foreground", lambda: True)
    monkeypatch.setattr(Trackers, "close", lambda *_: os.kill(os.getpid(), signal.SIGINT))

    code, events = run("checkpoint.interval=0", at_step=at_step, happens=lambda: os.kill(os.getpid(), signal.SIGINT))

    assert code == 130
    assert told(events)[-2:] == [("saved", end[1]), end]


def test_a_terminal_that_is_closed_means_nothing_to_a_run_that_was_told_to_ignore_it(run):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, events = run(at_step=3, happens=lambda: os.kill(os.getpid(), signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)

    assert (code, events[-1]["event"]) == (0, "completed")


def test_the_clock_stops_a_run_as_a_signal_does(run):
    limit = ['run.time_limit="1"', "run.stop_before_end=57", "train.steps=1000000", "checkpoint.interval=0"]

    code, events = run(*limit)

    assert code == 3
    assert [event["event"] for event in events] == ["started", "stopping", "saved", "preempted"]
    assert (events[1]["lead"], events[-1]["reason"]) == (57, "the time limit")
    assert run.store.steps() == [events[-1]["step"]]


def test_a_start_goes_by_the_saves_of_those_before_it(run, tiny, capsys):
    assert run("train.steps=3")[0] == 0
    path = tiny.path() / "events.jsonl"
    path.write_text(re.sub(r'"seconds": [\d.e-]+', '"seconds": 900.0', path.read_text()) + '{"event": "sav')

    assert run("train.steps=5", 'run.time_limit="2:00:00"')[0] == 0

    assert re.search(
        r"saving has taken 900 s in an earlier start: this one will stop 180\d s before", capsys.readouterr().out
    )


def test_a_save_that_fails_is_told(run, monkeypatch):
    commit = CheckpointStore.commit

    def full(self, unfinished, step):
        if step == 4:
            raise OSError(28, "No space left on device")
        commit(self, unfinished, step)

    monkeypatch.setattr(CheckpointStore, "commit", full)

    code, events = run("checkpoint.interval=4", "train.steps=9")

    assert code == 0
    assert told(events) == [("started", 0), ("save_failed", 4), ("saved", 8), ("saved", 9), ("completed", 9)]
    assert "No space left" in events[1]["error"]


def test_updates_that_are_left_out_and_going_back_are_told(run):
    code, events = run("optimizer.lr=1e30", "train.clip_norm=0", "checkpoint.interval=1", "train.steps=40")

    assert code == 4
    assert {"skipped", "rolled_back"} <= {event["event"] for event in events}
    assert (events[-1]["event"], events[-1]["exit_code"]) == ("failed", 4)


def test_copies_to_a_mirror_are_told_and_so_are_those_that_fail(run, tmp_path):
    """It is lost in one act, a link that becomes a file: the thread that copies may be at any point, and would make
    anew what is missing."""
    folder, mirror, file = tmp_path / "there", tmp_path / "far", tmp_path / "no folder"
    folder.mkdir()
    file.touch()
    mirror.symlink_to(folder)
    keep = [f"checkpoint.mirror={mirror}", "checkpoint.interval=4", "checkpoint.keep_last=1"]

    code, events = run(*keep, at_step=9, happens=lambda: file.replace(mirror))

    assert code == 0
    assert [event for event in told(events) if event[0] == "mirror_failed"][-1] == ("mirror_failed", 10)
    mirror.unlink()
    mirror.symlink_to(folder)
    code, events = run(*keep, "train.steps=12")
    assert code == 0
    assert [step for event, step in told(events) if event == "mirrored"][-1] == 12


def written():
    """The fields of every event that the source writes, by name; ``None`` where they are not told one by one."""
    found = {}
    sources = [
        *ROOT.glob("forge_core/**/*.py"),
        *ROOT.glob("plugins/*/src/**/*.py"),
        *ROOT.glob("forge_*/src/**/*.py"),
    ]
    for source in sources:
        for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "").endswith("write_event"):
                name, fields = call.args[0], {keyword.arg for keyword in call.keywords}
                if isinstance(name, ast.Name):
                    events = ENDS if name.id == "outcome" else [f"{source}:{call.lineno}"]
                else:
                    events = [one.value for one in ast.walk(name) if isinstance(one, ast.Constant) and one.value]
                found |= dict.fromkeys(events, None if None in fields else fields - {"step"})
    return found


def test_the_page_has_every_event_that_is_written_and_no_other():
    table, source = documented(), written()

    assert table.keys() == source.keys()
    assert {event: table[event] for event, fields in source.items() if fields is not None} == {
        event: fields for event, fields in source.items() if fields is not None
    }
