"""How long it takes until a rank that is lost is named, and until nothing is left of its run.

    python benchmarks/lost_peers.py [--repeats N] [--ranks N]

A small job under ``forge run --nproc``, on this machine. A rank is killed; a rank is stopped, as one is whose machine
no longer answers; the launcher is killed; a second process wants to train in the same folder. Linux only, as ``/proc``
is looked at. What took longer than it may is marked, as a machine that does other work takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STEP_TIMEOUT = 6.0
MARK = "FORGE_BENCHMARK"
"""Environment variable that all processes of a job have."""

TOML = """
[run]
name = "lost"
dir = "{folder}"
device = "cpu"
step_timeout = {timeout}

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4

[data]
name = "text_files"
path = "{folder}/text"
workers = 0

[train]
steps = 1000000
seq_len = 32
batch_size = 1
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3

[scheduler]
name = "constant"

[metrics]
interval = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    limits = {"named": STEP_TIMEOUT + 2, "gone": STEP_TIMEOUT + 35}
    cases: dict[str, tuple[Callable[[Job], dict[str, float]], dict[str, float]]] = {
        "a rank is killed": (rank_killed, limits),
        "a rank is stopped": (rank_stopped, limits),
        "the launcher is killed": (launcher_killed, {"ranks gone": 2.0}),
        "a second trainer": (second_trainer, {"refused": 5.0}),
    }
    for name, (case, allowed) in cases.items():
        seen: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            with Job.training(options.ranks) as job:
                for what, seconds in case(job).items():
                    seen.setdefault(what, []).append(seconds)
        for what, all_seconds in seen.items():
            mark = "  above" if max(all_seconds) > allowed[what] else ""
            figures = ", ".join(f"{seconds:.2f}" for seconds in all_seconds)
            print(f"{name:24} {what:12} {figures} s (allowed: {allowed[what]:g}){mark}", flush=True)


class Job:
    """A run that trains."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        (folder / "text/numbers.txt").write_text("".join(f"{n} and {n * n}.\n" for n in range(2000)))
        self.config = folder / "lost.toml"
        self.config.write_text(TOML.format(folder=folder, timeout=STEP_TIMEOUT))
        self.said: list[tuple[float, str]] = []
        """Lines of the launcher and all ranks, and when they came."""
        self.launcher = self.command("--nproc", str(ranks), stderr=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    @contextlib.contextmanager
    def training(cls, ranks: int) -> Iterator[Job]:
        with tempfile.TemporaryDirectory() as folder:
            job = cls(Path(folder), ranks)
            try:
                until(lambda: job.steps() > 20 or job.launcher.poll() is not None, 120)
                assert job.launcher.poll() is None, job.said
                yield job
            finally:
                for process in job.processes():
                    os.kill(process, signal.SIGKILL)
                job.launcher.wait()

    def command(self, *options: str, stderr: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "forge_core", "run", str(self.config), *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(self.folder)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
        )

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        for line in self.launcher.stderr:
            self.said.append((time.monotonic(), line))

    def steps(self) -> int:
        metrics = self.folder / "lost/metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def processes(self) -> list[int]:
        """All that are left of it: ranks, launcher, watchdogs."""
        return [process for process, _ in self._environments()]

    def ranks(self) -> list[int]:
        """In their order."""
        found: dict[int, int] = {}
        for process, environment in self._environments():
            if "RANK" in environment and b"watchdog" not in _read(process, "cmdline"):
                found.setdefault(int(environment["RANK"]), process)
        return [found[rank] for rank in sorted(found)]

    def _environments(self) -> Iterator[tuple[int, dict[str, str]]]:
        for folder in Path("/proc").glob("[0-9]*"):
            process = int(folder.name)
            text = _read(process, "environ").decode(errors="replace")
            own = dict(line.partition("=")[::2] for line in text.split("\0"))
            if own.get(MARK) == str(self.folder) and _read(process, "stat").rpartition(b")")[2].split()[0] != b"Z":
                yield process, own


def rank_killed(job: Job) -> dict[str, float]:
    return _lost(job, signal.SIGKILL)


def rank_stopped(job: Job) -> dict[str, float]:
    return _lost(job, signal.SIGSTOP)


def _lost(job: Job, number: signal.Signals) -> dict[str, float]:
    began = time.monotonic()
    os.kill(job.ranks()[-1], number)
    until(lambda: not job.processes(), 120)
    gone = time.monotonic() - began
    named = next(when for when, line in job.said if "has lost another rank" in line) - began
    return {"named": named, "gone": gone}


def launcher_killed(job: Job) -> dict[str, float]:
    began = time.monotonic()
    job.launcher.kill()
    until(lambda: not job.ranks(), 60)
    return {"ranks gone": time.monotonic() - began}


def second_trainer(job: Job) -> dict[str, float]:
    began = time.monotonic()
    second = job.command(stderr=subprocess.DEVNULL)
    code = second.wait()
    assert code == 2, code
    return {"refused": time.monotonic() - began}


def until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _read(process: int, what: str) -> bytes:
    """A file of ``/proc``; of a process that has just ended, as if it were a zombie."""
    try:
        return Path(f"/proc/{process}/{what}").read_bytes()
    except OSError:
        return b"(gone) Z" if what == "stat" else b""


if __name__ == "__main__":
    main()
