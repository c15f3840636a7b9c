"""The runs of a study as processes: so many side by side, each started when one before it has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

import attrs

from forge_core.errors import ExitCode

_POLL = 0.05
"""Seconds between two looks at the processes."""
_PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h


@attrs.frozen(kw_only=True)
class Task:
    """A run to start."""

    name: str
    arguments: Sequence[str]
    """The words behind ``forge``."""
    log: Path
    """Takes what it prints, behind what is there."""


@attrs.frozen(kw_only=True)
class Ended:
    """How a run has ended."""

    code: int
    """Its exit code; negative, the signal that has killed it."""
    seconds: float
    output: str
    """The last error that it has printed, or else its last line."""


class StopRequests:
    """Ctrl-C and SIGTERM, counted, in place of what they did before."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        for one in (signal.SIGINT, signal.SIGTERM):
            self._before[one] = signal.signal(one, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)  # type: ignore[arg-type]  # what signal itself has given

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.number += 1


def run_tasks(
    tasks: Sequence[Task],
    parallel: int,
    variables: Callable[[int], Mapping[str, str]],
    tell: Callable[[Task, Ended | None], None],
) -> dict[str, Ended]:
    """Run all tasks, at most ``parallel`` at the same time, in their order.

    The first Ctrl-C or SIGTERM asks the running ones to save and stop, and starts no more; the second kills them.

    Args:
        variables: more of the environment, for the place from 0 to ``parallel − 1`` that a task takes.
        tell: called with a task when it starts, and again with how it has ended.

    Returns:
        How each has ended that was started, by name.
    """
    waiting, free = list(tasks), list(range(parallel))
    running: dict[subprocess.Popen[bytes], _Place] = {}
    ended: dict[str, Ended] = {}
    with StopRequests() as requests:
        answered = 0
        while running or (waiting and not requests.number):
            while waiting and free and not requests.number:
                task, place = waiting.pop(0), free.pop(0)
                tell(task, None)
                printed = task.log.stat().st_size if task.log.exists() else 0
                running[_start(task, variables(place))] = _Place(task, place, time.monotonic(), printed)
            for process in [one for one in running if one.poll() is not None]:
                one = running.pop(process)
                free.append(one.place)
                code = process.returncode
                if requests.number and code == -signal.SIGTERM:  # it was told to stop before it could listen
                    code = ExitCode.STOPPED
                ended[one.task.name] = Ended(
                    code=code, seconds=time.monotonic() - one.since, output=_last_line(one.task.log, one.printed)
                )
                tell(one.task, ended[one.task.name])
            if requests.number > answered:
                answered = requests.number
                for process in running:
                    process.send_signal(signal.SIGTERM if answered == 1 else signal.SIGKILL)
            time.sleep(_POLL)
    return ended


@attrs.frozen
class _Place:
    """A task that runs."""

    task: Task
    place: int
    since: float
    printed: int
    """Bytes of its log that earlier attempts have written."""


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]  # another start of the run may write there, too
    return (errors or lines or ["it said nothing"])[-1]


def _start(task: Task, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "forge_core", *task.arguments]
    with task.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,  # the terminal's Ctrl-C reaches it through this process alone
            preexec_fn=_stop_with_parent,
        )


def _stop_with_parent() -> None:
    """From now on, the kernel asks this process to save and stop when the one that started it dies (Linux only)."""
    if sys.platform == "linux":
        with suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def state_of(code: int) -> str:
    """The state in which a process leaves its run: ``completed``, ``stopped`` (saved), or how it has failed."""
    if code < 0:
        names = {int(one): one.name for one in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return {int(ExitCode.COMPLETED): "completed", int(ExitCode.STOPPED): "stopped"}.get(code, f"failed ({code})")
