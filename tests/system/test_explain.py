"""Real runs that end are explained from what they leave behind."""

import json
import signal
import subprocess
import time

import pytest

import fork_server
from forge_core.cli import main


@pytest.fixture
def told(tiny, capsys):
    def ask():
        capsys.readouterr()
        assert main(["explain", str(tiny.path()), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def test_a_run_that_was_killed_then_stopped_then_has_gone_on(tiny, told):
    job = ("train.steps=100000", "checkpoint.interval=10", "checkpoint.background=false")

    end_at(tiny, 25, signal.SIGKILL, *job)
    killed = told()
    assert (killed["state"], killed["exit_code"]) == ("failed", None)
    assert "was killed" in killed["why"]
    assert killed["lost_steps"] == killed["step"] - killed["checkpoint"]
    assert killed["next"].startswith("forge run ")

    end_at(tiny, 50, signal.SIGTERM, *job)
    stopped = told()
    assert (stopped["state"], stopped["exit_code"], stopped["lost_steps"]) == ("stopped", 3, 0)
    assert "SIGTERM" in stopped["why"]

    assert main(["run", str(tiny.config), f"train.steps={stopped['step'] + 1}", *job[1:]]) == 0
    done = told()
    assert (done["state"], done["exit_code"], done["next"]) == ("finished", 0, f"forge report {tiny.path()}")


def end_at(tiny, step, number, *overrides):
    """Send a run a signal when it has logged ``step``."""
    run = fork_server.Popen(
        tiny.command(*overrides), env=tiny.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while last_step(tiny.path() / "metrics.jsonl") < step and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(number)
    run.wait()


def last_step(metrics):
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
