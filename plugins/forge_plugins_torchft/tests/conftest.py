"""A small job with replicas, and ways to run it in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fork_server
from forge_core.checkpoint.store import CheckpointStore
from forge_plugins_torchft.config import HOST, LIGHTHOUSE, NAME

collect_ignore_glob = [] if find_spec("torchft") else ["test_*.py"]
"""torchft has no wheel for Python 3.14, nor for macOS."""

TOML = """
[run]
name = "both"
dir = "{folder}/runs"

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

[train]
steps = 10
seq_len = 32
batch_size = 4
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[metrics]
interval = 1

[anomalies]
give_up_after = 0

[[callbacks]]
name = "torchft"
"""


class ReplicatedJob:
    """A job in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "both.toml"
        self.config.write_text(TOML.format(folder=folder))
        (folder / "text").mkdir()
        for i in range(12):
            lines = "\n".join(f"line {j} of file {i}: {(i * 7919 + j * 104729) % 9973}" for j in range(60))
            (folder / "text" / f"{i}.txt").write_text(lines)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: str, *overrides: str, **environment: str) -> subprocess.Popen[bytes]:
        with self._output(len(self._started)).open("w") as output:
            process = fork_server.Popen(
                [sys.executable, "-m", "forge_core", command, str(self.config), *overrides],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def start_replica(self, url: str, number: int, *overrides: str, **environment: str) -> subprocess.Popen[bytes]:
        """One alone, with the lighthouse at ``url`` and a folder as ``forge replicas`` has it."""
        directory = [f"run.dir={self.folder}/runs/both", f"run.name=replica_{number}"]
        names = {LIGHTHOUSE: url, HOST: "127.0.0.1", NAME: f"replica_{number}"}
        return self.start("run", *directory, *overrides, **names, **environment)

    def output(self, process: subprocess.Popen[bytes]) -> str:
        """All of it, once the process has ended."""
        process.wait(timeout=240)
        return self._output(self._started.index(process)).read_text()

    def run(self, command: str, *overrides: str, **environment: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(command, *overrides, **environment)
        said = self.output(process)
        return process.returncode, said

    def end(self) -> None:
        for process in self._started:
            process.kill()  # with it go the replicas that it has started
            process.wait(timeout=30)

    def wait_until(self, condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 200) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            said = self._output(self._started.index(process))
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()[-2000:]
            time.sleep(0.05)

    def _output(self, place: int) -> Path:
        return self.folder / f"output_{place}.txt"

    def directory(self, replica: int) -> Path:
        return self.folder / "runs" / "both" / f"replica_{replica}"

    def lines(self, directory: Path, file: str) -> list[dict[str, Any]]:
        path = directory / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metrics(self, replica: int) -> list[dict[str, Any]]:
        return self.lines(self.directory(replica), "metrics.jsonl")

    def events(self, replica: int, *names: str) -> list[dict[str, Any]]:
        found = self.lines(self.directory(replica), "events.jsonl")
        return [event for event in found if event["event"] in names]

    def kill(self, replica: int) -> None:
        self.tell(replica, signal.SIGKILL)

    def tell(self, replica: int, number: signal.Signals) -> None:
        """Send a signal to its rank 0 alone, once it heeds it."""
        process = json.loads((self.directory(replica) / "lease.json").read_text())["process"]
        status = Path(f"/proc/{process}/status")
        while number != signal.SIGKILL and status.exists():  # Linux
            (caught,) = re.findall(r"SigCgt:\s*(\w+)", status.read_text())
            if int(caught, 16) >> (number - 1) & 1:
                break
            time.sleep(0.05)
        os.kill(process, number)

    def saved(self, replica: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """State and tensors of the newest checkpoint."""
        checkpoint = CheckpointStore(self.directory(replica) / "checkpoints").newest(print)
        assert checkpoint is not None
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in checkpoint.saved_tensors().items()
        }
        checkpoint.load(tensors)
        return checkpoint.state(), tensors


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ReplicatedJob]:
    job = ReplicatedJob(tmp_path)
    yield job
    job.end()
