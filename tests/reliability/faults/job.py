"""A small job of two ranks that is killed and started again, and the history that it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOML = """
[run]
name = "small"
dir = "{folder}/runs"
device = "cpu"
step_timeout = 20

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 64

[data]
name = "text_files"
path = "{folder}/text"
pattern = "**/*.txt"
validation = 0.3
workers = 2

[train]
steps = {steps}
seq_len = 32
batch_size = 4
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3

[scheduler]
name = "cosine"
warmup_steps = 2

[metrics]
interval = 1

[checkpoint]
interval = {interval}
keep_last = 3
"""


class SmallJob:
    """In a folder of its own. Losses are collected from all attempts: ``metrics.jsonl`` itself forgets what is done
    again."""

    def __init__(
        self, folder: Path, *, steps: int, interval: int, popen: type[subprocess.Popen[bytes]] = subprocess.Popen
    ) -> None:
        self.run = folder / "runs" / "small"
        self.losses: dict[int, set[tuple[float, float]]] = {}
        """By step: loss and gradient norm of every attempt that came so far; one if they agree."""
        self._popen = popen
        self._config = folder / "small.toml"
        self._output = folder / "output"
        self._process: subprocess.Popen[bytes] | None = None
        text = folder / "text"
        text.mkdir(parents=True)
        for i in range(12):
            lines = "\n".join(f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(60))
            (text / f"{i}.txt").write_text(lines)
        self._config.write_text(TOML.format(folder=folder, steps=steps, interval=interval))

    def start(self, *options: str) -> None:
        with self._output.open("ab") as output:
            self._process = self._popen(
                [sys.executable, "-m", "forge_core", "run", str(self._config), "--nproc", "2", *options],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def send(self, process: int, number: int) -> None:
        """A signal to one of its processes, if that is still there."""
        _send(process, number)

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        assert self._process is not None
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._output.read_text()

    def ranks(self) -> list[int]:
        """Process numbers of those that train, rank 0 first."""
        assert self._process is not None
        found = {}
        for process in descendants(self._process.pid):
            try:
                environment = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            own = dict(line.partition("=")[::2] for line in environment)
            if "RANK" in own and own.get("LOCAL_RANK"):
                found.setdefault(int(own["RANK"]), process)  # what a rank starts has its environment
        return [found[rank] for rank in sorted(found)]

    def kill_all(self) -> None:
        """The launcher and everything it has started, in whatever session. First they are stopped, so that none sees
        another end."""
        assert self._process is not None
        stopped: set[int] = set()
        while new := {self._process.pid, *descendants(self._process.pid)} - stopped:
            for process in new:
                _send(process, signal.SIGSTOP)
            stopped |= new
        for process in stopped:
            _send(process, signal.SIGKILL)
        self._process.wait()
        self.collect()

    def collect(self) -> None:
        """Take note of the losses so far."""
        for line in self.metrics():
            if "loss" in line:
                self.losses.setdefault(int(line["step"]), set()).add((line["loss"], line["grad_norm"]))

    def metrics(self) -> list[dict[str, Any]]:
        return _lines(self.run / "metrics.jsonl")

    def events(self) -> list[dict[str, Any]]:
        return _lines(self.run / "events.jsonl")

    def step(self) -> int:
        """The last that has been logged."""
        lines = self.metrics()
        return int(lines[-1]["step"]) if lines else 0

    def wait_for(self, step: int, seconds: float = 240) -> bool:
        """Whether the run has come so far, rather than ended before."""
        deadline = time.monotonic() + seconds
        while self.step() < step:
            if self.code is not None:
                return False
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.01)
        return True

    def wait(self, seconds: float = 240) -> int:
        """Until it ends by itself; returns the exit code."""
        assert self._process is not None
        code = self._process.wait(seconds)
        self.collect()
        return code


def descendants(process: int) -> list[int]:
    """All processes that it has started, and then those that they have."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    waiting = [process]
    while waiting:
        new = children.get(waiting.pop(0), [])
        found += new
        waiting += new
    return found


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _lines(file: Path) -> list[dict[str, Any]]:
    """The last may be cut short."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
