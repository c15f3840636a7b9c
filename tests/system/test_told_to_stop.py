"""Every way in which a run can be told to stop, from outside, with one process and with ``--nproc``."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fork_server
from forge_core.checkpoint.store import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc is looked at")]

HOLD = """
import os, time
from forge_core.contracts.callback import Callback

class Hold(Callback):
    '''Waits at a step until the run is told to stop, or to go on; or for ever.'''

    def __init__(self, config):
        pass

    def step_end(self, run, context):
        if context.step == int(os.environ.get("HOLD_AT", "0")):
            (run.run_dir / f"held_{run.rank}").touch()
            go = run.run_dir / "go"
            while not (run.requests.stop or go.exists()) or "FOR_EVER" in os.environ:
                time.sleep(0.01)
"""
PLUGIN = """
from forge_core.api import Component, hookimpl
FORGE_API = "1.0"

@hookimpl
def forge_callbacks():
    yield Component(name="hold", summary="-", factory="acme_hold.hold:Hold", config="acme_hold.config:Config")
"""
CONFIG = "import attrs\n\n@attrs.frozen(kw_only=True)\nclass Config:\n    pass\n"
TERMINAL = """
import os, pty, signal, sys
if "NOHUP" in os.environ:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""
"""What it is given is started on a terminal, on which its own input is typed."""
ON_TERMINAL = (sys.executable, "-c", TERMINAL)
READ_NO_MORE = ("bash", "-c", '"$@" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}', "bash")


SETTINGS = ('callbacks=["hold"]', "model.n_layers=1", "train.batch_size=2")


class Held:
    """A run that waits at a step until it is told to stop."""

    def __init__(self, tiny, packages, ranks, *overrides, name="tiny", at=0, within=(), **environment):
        self.folder, self.ranks = tiny.path(name), ranks
        for file in self.folder.glob("held_*"):
            file.unlink()
        command = tiny.command("--nproc", str(ranks), f"run.name={name}", "checkpoint.interval=0", *overrides)
        self.process = fork_server.Popen(
            [*within, *command],
            env={**tiny.environment(), "PYTHONPATH": str(packages), "HOLD_AT": str(at), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # no terminal
        )

    def wait(self):
        """Until all ranks are there."""
        deadline = time.monotonic() + 200
        while len(list(self.folder.glob("held_*"))) < self.ranks:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self

    def send(self, number, times=1):
        for _ in range(times):
            if self.process.poll() is None:
                self.process.send_signal(number)
                time.sleep(0.05)

    def type(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def all_processes(self):
        """Launcher, ranks and watchdogs."""
        return [self.process.pid, *_below(self.process.pid)]

    def ended(self):
        """Exit code, output, errors."""
        out, err = self.process.communicate(timeout=200)
        return self.process.returncode, out, err

    def last_event(self):
        return json.loads((self.folder / "events.jsonl").read_text().splitlines()[-1])

    def checkpoints(self):
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step_*"))


def _below(process):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process and fields[0] != "Z":
            found += [int(stat.parent.name), *_below(int(stat.parent.name))]
    return found


@pytest.fixture
def held(tiny, make_distribution):
    packages = make_distribution(
        "acme-hold",
        files={"acme_hold/plugin.py": PLUGIN, "acme_hold/hold.py": HOLD, "acme_hold/config.py": CONFIG},
    )
    started = []

    def start(ranks, *overrides, **options):
        started.append(Held(tiny, packages, ranks, *SETTINGS, *overrides, **options))
        return started[-1]

    yield start
    for run in started:
        for process in run.all_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        run.process.communicate()


def same(run, other):
    """Whether two checkpoints hold the same tensors, bit for bit."""
    loaded = []
    for path in (run, other):
        found = open_checkpoint(path)
        entries = found.saved_tensors()
        tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in entries.items()}
        found.load(tensors)
        loaded.append(tensors)
    return loaded[0].keys() == loaded[1].keys() and all(
        torch.equal(tensor, loaded[1][name]) for name, tensor in loaded[0].items()
    )


def test_two_ranks_stopped_by_every_signal_make_one_unbroken_history(held):
    """The launcher is told, once or again and again as schedulers and people do; and all processes at once. SIGHUP
    comes from a terminal, below."""
    steps, whole = "train.steps=13", held(2, "train.steps=13", name="whole")
    assert whole.ended()[0] == 0

    stops = [(signal.SIGINT, 10), (signal.SIGTERM, 10), (signal.SIGUSR1, 1)]
    for at, (number, times) in enumerate(stops):
        run = held(2, steps, at=2 + 2 * at).wait()
        run.send(number, times)
        code, _, err = run.ended()
        assert (code, err) == (3, ""), (number, code, err)
        event = "stopped" if number == signal.SIGINT else "preempted"
        assert run.last_event().items() >= {"event": event, "reason": number.name}.items()
    run = held(2, steps, at=8).wait()
    for process in run.all_processes():
        os.kill(process, signal.SIGINT)
    assert run.ended()[::2] == (3, "")
    stopped_at = run.last_event()["step"]
    assert run.checkpoints() == [f"step_{step:08d}" for step in (3, 5, 7, 9)]

    run = held(2, steps, at=11).wait()
    run.send(signal.SIGQUIT)
    code, _, err = run.ended()
    assert code == 1
    assert [len(re.findall(f"^rank {rank}:$", err, re.MULTILINE)) for rank in range(2)] == [1, 1], err
    assert err.count("hold.py") == 2
    assert run.checkpoints()[-1] == f"step_{stopped_at:08d}"

    run = held(2, steps)
    assert run.ended()[0] == 0
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 14))
    assert same(run.folder / "checkpoints/step_00000013", whole.folder / "checkpoints/step_00000013")


def test_ctrl_c_twice_leaves_at_once_and_a_closed_terminal_saves(held):
    twice = held(2, name="twice", at=2, within=ON_TERMINAL, FOR_EVER="1")
    closed = [held(n, name=f"closed-{n}", at=2, within=ON_TERMINAL) for n in (1, 2)]

    twice.wait().type("\x03")
    for run in closed:
        run.wait().process.kill()
    time.sleep(0.5)
    twice.type("\x03")

    code, out, _ = twice.ended()
    assert code == 130, out
    assert "once more leaves at once" in out
    assert twice.checkpoints() == []
    deadline = time.monotonic() + 100
    for run in closed:
        while run.last_event()["event"] != "preempted":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert run.last_event()["reason"] == "SIGHUP"
        assert run.checkpoints() == [f"step_{run.ranks + 1:08d}"]


@pytest.mark.nightly
def test_a_run_goes_on_when_nobody_reads_what_it_prints(held):
    """A terminal that is closed under ``nohup``, with the progress bar on it; and ``| head``."""
    terminal = held(1, name="terminal", at=2, within=ON_TERMINAL, NOHUP="1").wait()
    terminal.process.kill()
    (terminal.folder / "go").touch()
    piped = held(2, name="piped", within=READ_NO_MORE)

    assert piped.ended()[::2] == (0, "")
    deadline = time.monotonic() + 100
    while terminal.last_event()["event"] != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for run in (piped, terminal):
        assert "done: 10 steps" in (run.folder / "log.txt").read_text()
        assert run.checkpoints() == ["step_00000010"]
