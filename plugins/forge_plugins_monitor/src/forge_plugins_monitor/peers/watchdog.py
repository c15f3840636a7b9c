"""A process beside each rank, which ends the rank when it hangs. A thread of the rank would hang with it.

It runs this file alone, without the packages of its rank: it starts in a few milliseconds, and takes a few megabytes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

STACKS_AFTER = 3.0
"""Seconds beyond the limit after which a rank has its stacks written: ranks that only wait for another one have left
by then."""
KILL_AFTER = 8.0
"""Seconds beyond the limit after which it is killed."""
WRITTEN_AFTER = 1.0
"""Seconds without a further line after which stacks are taken to be whole: a rank on a busy machine writes slowly."""
LAUNCHER_AFTER = 10.0
"""Seconds after the end of a rank that has not reached its own, in which torchrun should have noticed. An agent that
waits for a host which is no longer there does not."""

_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a watchdog does not hear, ever: whoever sends them to all processes means the ranks, which it watches
until they have ended."""


class Watchdog:
    """Ends this process if it does not ``tell`` again in time.

    Args:
        who: how the process is called in what the watchdog says.
        stacks: the file for the stacks of a process that hangs. It is written only then. ``kill -USR2`` prepares them
            at any other time as well.
        launcher: a process to end, too, should it outlive this one by ``LAUNCHER_AFTER`` seconds; 0 for none.
    """

    def __init__(self, who: str, stacks: Path, launcher: int = 0) -> None:
        # not in the run's directory: a file system that does not answer may be why a rank hangs
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process lives
        faulthandler.register(signal.SIGUSR2, file=self._dump, all_threads=True)
        inbox, self._outbox = os.pipe()
        os.set_blocking(self._outbox, False)
        facts = {
            "who": who,
            "rank": os.getpid(),
            "stacks": str(stacks.absolute()),
            "dump": self._dump.fileno(),
            "launcher": launcher,
        }
        with _held_back(_FOR_RANKS):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps(facts)],
                stdin=inbox,
                stdout=subprocess.DEVNULL,
                pass_fds=[self._dump.fileno()],
                start_new_session=True,
            )
        os.close(inbox)

    def tell(self, step: int, seconds: float) -> None:
        """This process is in ``step``, and will tell again within so many seconds."""
        # a pipe that is full has no reader: the watchdog has been stopped or killed, and the rank trains on
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._outbox, f"{step} {seconds}\n".encode())

    def close(self) -> None:
        """This process needs no watching any more."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._outbox, b"done\n")
        os.close(self._outbox)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        faulthandler.unregister(signal.SIGUSR2)
        self._dump.close()


@contextlib.contextmanager
def _held_back(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Hold signals back in all that this thread starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Rank:
    """The watched process, as its watchdog sees it."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.who: str = facts["who"]
        self.process: int = facts["rank"]
        self.stacks = Path(facts["stacks"])
        self.dump: int = facts["dump"]
        self.launcher: int = facts["launcher"]
        self.launcher_started = _started(self.launcher)
        self.step = 0
        self.limit = float("inf")
        self.told = time.monotonic()
        self.is_done = False
        self._unread = b""

    def watch(self) -> None:
        writing: threading.Thread | None = None
        while not self.is_done and os.getppid() == self.process and self._listen():
            overdue = time.monotonic() - self.told - self.limit
            if overdue > KILL_AFTER:
                _send(self.process, signal.SIGKILL)
                break
            if overdue > STACKS_AFTER and writing is None:
                self._take_stacks()
                writing = threading.Thread(target=self._write_stacks, daemon=True)
                writing.start()
        if writing is not None:
            writing.join(timeout=10)  # the directory may be on a file system that does not answer
        if self.launcher and not self.is_done:
            self._end_launcher()

    def _listen(self) -> bool:
        """For half a second; false when the rank has ended."""
        if not select.select([0], [], [], 0.5)[0]:
            return True
        read = os.read(0, 65536)
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            if line == b"done":
                self.is_done = True
            else:
                step, seconds = line.split()
                self.step, self.limit, self.told = int(step), float(seconds), time.monotonic()
        return read != b""

    def _take_stacks(self) -> None:
        state = _state(self.process)
        _send(self.process, signal.SIGUSR2)
        _send(self.process, signal.SIGCONT)  # one that is stopped writes nothing
        _say(
            f"{self.who} has got no further for {time.monotonic() - self.told:.0f} s, in step {self.step}{state}; it "
            f"is ended now, its stacks are in {self.stacks}"
        )

    def _write_stacks(self) -> None:
        size, grown = 0, time.monotonic()
        deadline = grown + KILL_AFTER - STACKS_AFTER - 1
        while time.monotonic() < deadline and not (size and time.monotonic() > grown + WRITTEN_AFTER):
            time.sleep(0.2)
            before, size = size, os.fstat(self.dump).st_size
            grown = time.monotonic() if size > before else grown
        text = os.pread(self.dump, size, 0).decode(errors="replace")
        text = text or "It did not react to the signal that asks for stacks.\n"
        try:
            self.stacks.parent.mkdir(parents=True, exist_ok=True)
            # a link that somebody else has put there is not followed
            descriptor = os.open(self.stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            with os.fdopen(descriptor, "a") as file:
                now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                file.write(f"{now} {self.who}, process {self.process}, step {self.step}\n{text}\n")
        except OSError as error:
            _say(f"the stacks of {self.who} cannot be written to {self.stacks}: {error}\n{text}")

    def _end_launcher(self) -> None:
        deadline = time.monotonic() + LAUNCHER_AFTER
        for number in (signal.SIGTERM, signal.SIGKILL):
            while time.monotonic() < deadline:
                if _started(self.launcher) != self.launcher_started:
                    return
                time.sleep(0.2)
            _say(f"the launcher of {self.who} (process {self.launcher}) is still there; it gets {number.name}")
            _send(self.launcher, number)
            deadline = time.monotonic() + 3


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(2, f"error: {sentence}\n".encode())


def _fields(process: int) -> list[str]:
    """The fields of ``/proc/<process>/stat`` from the state on; empty if there is no such process, or no ``/proc``."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(process: int) -> str:
    """When, in ticks since boot; empty if there is none that runs."""
    fields = _fields(process)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _state(process: int) -> str:
    fields = _fields(process)
    return {"T": ": its process is stopped", "D": ": its process waits for a disk or a device"}.get(
        fields[0] if fields else "", ""
    )


if __name__ == "__main__":
    _Rank(json.loads(sys.argv[1])).watch()
