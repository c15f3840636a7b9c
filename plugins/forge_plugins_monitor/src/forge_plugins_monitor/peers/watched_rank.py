"""The watchdog's side of a rank: a process that hears from it, and ends it when it hangs.

The process runs this file alone. It imports as little as it can, since each rank starts one: not even contextlib.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

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


class WatchedRank:
    """The watched process, as its watchdog sees it."""

    def __init__(self, who: str, process: int, stacks: str, dump: int, launcher: int) -> None:
        """
        Args:
            stacks: the file that they are written to.
            dump: the descriptor of the file into which the process dumps them.
            launcher: 0 for none.
        """
        self.who, self.process, self.stacks, self.dump, self.launcher = who, process, stacks, dump, launcher
        self.launcher_started = _started(self.launcher)
        self.step = 0
        self.limit = float("inf")
        self.told = time.monotonic()
        self.is_done = False
        self._unread = b""

    def watch(self) -> None:
        writing = None
        while not self.is_done and os.getppid() == self.process and self._listen():
            overdue = time.monotonic() - self.told - self.limit
            if overdue > KILL_AFTER:
                _send(self.process, signal.SIGKILL)
                break
            if overdue > STACKS_AFTER and writing is None:
                import threading  # for a rank that hangs

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
            os.makedirs(os.path.dirname(self.stacks), exist_ok=True)  # noqa: PTH103, PTH120 - pathlib takes long to import
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
    try:  # noqa: SIM105
        os.kill(process, number)
    except ProcessLookupError:
        pass


def _say(sentence: str) -> None:
    try:  # noqa: SIM105
        os.write(2, f"error: {sentence}\n".encode())
    except OSError:  # the reader is gone
        pass


def _fields(process: int) -> list[str]:
    """The fields of ``/proc/<process>/stat`` from the state on; empty if there is no such process, or no ``/proc``."""
    try:
        with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
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
    WatchedRank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])).watch()
