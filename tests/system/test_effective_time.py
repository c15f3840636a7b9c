"""A run that is killed and goes on knows how much of its time it has trained for good."""

import json
import signal
import statistics
import subprocess
import time
from datetime import datetime

import pytest

import fork_server
from forge_core.cli import main
from forge_plugins_monitor.run_states import progress

STEPS = 60


@pytest.fixture
def told(tiny, capsys):
    """What ``forge runs --json`` says of the run's effective time."""

    def ask():
        capsys.readouterr()
        assert main(["runs", str(tiny.path()), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        return row["effective_time"]

    return ask


def test_a_run_that_was_killed_and_resumed(tiny, told, capsys, monkeypatch):
    monkeypatch.setattr(progress, "ALIVE", 0.0)
    job = (f"train.steps={STEPS}", "checkpoint.interval=15", "checkpoint.background=false")
    reached = kill_at(tiny, 40, *job, "train.steps=100000")
    newest = max(progress.checkpoint_steps(tiny.path()))
    assert 0 < newest <= reached

    killed = told()
    assert (killed["starts"], killed["kept_steps"]) == (1, newest)
    assert 0 < killed["ratio"] < 1

    assert main(["run", str(tiny.config), *job]) == 0

    done = told()
    events = [json.loads(line) for line in (tiny.path() / "events.jsonl").read_text().splitlines()]
    times = [datetime.fromisoformat(event["time"]).timestamp() for event in events]
    names = [event["event"] for event in events]
    assert (names[0], names[-1], done["starts"]) == ("started", "completed", 2)
    assert done["seconds"] == pytest.approx(times[-1] - times[0])
    lines = [line for line in tiny.metrics() if "step_seconds" in line]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    seconds = {line["step"]: line["step_seconds"] for line in lines}
    first = {1, newest + 1}
    usual = statistics.median(value for step, value in seconds.items() if step not in first)
    expected = sum(min(value, usual) if step in first else value for step, value in seconds.items())
    assert (done["kept_steps"], done["left_out_steps"]) == (STEPS, 0)
    assert done["kept_seconds"] == pytest.approx(expected)
    assert done["ratio"] == pytest.approx(expected / (times[-1] - times[0]))
    assert done["waited_seconds"] == sum(event["seconds_blocked"] for event in events if event["event"] == "saved") > 0

    assert main(["runs", str(tiny.path())]) == 0
    assert f"since the first of 2 starts; {STEPS} steps that stay took" in capsys.readouterr().out.replace("\n", " ")


def kill_at(tiny, step, *overrides):
    """Kill a run when it has logged ``step``; returns the last one that it has logged."""
    run = fork_server.Popen(
        tiny.command(*overrides), env=tiny.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = tiny.path() / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while steps_of(metrics) < step and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    return steps_of(metrics)


def steps_of(metrics):
    """How many whole lines there are, each of a step."""
    return metrics.read_text().count('"step_seconds"') if metrics.exists() else 0
