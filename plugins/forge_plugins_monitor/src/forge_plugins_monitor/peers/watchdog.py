"""A process beside each rank, which ends the rank when it hangs. A thread of the rank would hang with it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from forge_plugins_monitor.peers import watched_rank

_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a watchdog does not hear, ever: whoever sends them to all processes means the ranks, which it watches
until they have ended."""


class Watchdog:
    """Ends this process if it does not ``tell`` again in time.

    Args:
        who: how the process is called in what the watchdog says.
        stacks: the file for the stacks of a process that hangs. It is written only then. ``kill -USR2`` prepares them
            at any other time as well.
        launcher: a process to end, too, should it outlive this one by
            ``watched_rank.LAUNCHER_AFTER`` seconds; 0 for none.
    """

    def __init__(self, who: str, stacks: Path, launcher: int = 0) -> None:
        # not in the run's directory: a file system that does not answer may be why a rank hangs
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process lives
        faulthandler.register(signal.SIGUSR2, file=self._dump, all_threads=True)
        inbox, self._outbox = os.pipe()
        os.set_blocking(self._outbox, False)
        facts = (who, os.getpid(), stacks.absolute(), self._dump.fileno(), launcher)
        with _held_back(_FOR_RANKS):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", watched_rank.__file__, *map(str, facts)],
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
