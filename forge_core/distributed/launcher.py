"""The ranks that ``--nproc`` starts on this machine: one process each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch forgets to export it

from forge_core.distributed.parent_death import LAUNCHER
from forge_core.errors import ExitCode

_BY_THEMSELVES, _AFTER_SIGTERM, _AFTER_CTRL_C = 5.0, 30.0, 5.0
"""Seconds that ranks get to end: when one of them has ended, then with SIGTERM, and when they are to leave at once."""


class LocalRanks:
    """They find each other through a store in this process, as those of torchrun do.

    Each is in a session of its own: Ctrl-C reaches them through their launcher alone.
    """

    def __init__(self, command: Sequence[str], n: int, environment: Mapping[str, str]) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = {
            **environment,
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": str(os.getpid()),
            LAUNCHER: str(os.getpid()),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(n):
                own = {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(subprocess.Popen(command, env=own, start_new_session=True))
        except BaseException:
            self._kill()
            raise

    def are_running(self) -> bool:
        """All of them, or the ranks that have not ended well yet."""
        codes = [process.poll() for process in self._processes]
        return None in codes and not any(codes)

    def first_failed(self) -> tuple[int, int] | None:
        """Its rank, and how it has ended: an exit code, or minus the number of a signal. Of several that have failed
        at once, one that has not just lost another."""
        failed = [(rank, process.returncode) for rank, process in enumerate(self._processes) if process.returncode]
        return min(failed, key=lambda one: one[1] == ExitCode.LOST_PEER, default=None)

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that run."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def end(self, is_in_a_hurry: Callable[[], bool]) -> None:
        """Once one of them has failed: the others find out by themselves, or else are told, or else killed.

        Args:
            is_in_a_hurry: asked again and again; once it says so, ``leave`` is what to do instead.
        """
        if self._wait(_BY_THEMSELVES, is_in_a_hurry) or is_in_a_hurry():
            return
        self.tell(signal.SIGTERM)
        if not self._wait(_AFTER_SIGTERM, is_in_a_hurry) and not is_in_a_hurry():
            self._kill()

    def leave(self, number: signal.Signals) -> None:
        """They are told by this signal, and not waited for."""
        self.tell(number)
        self._wait(_AFTER_CTRL_C, lambda: False)
        self._kill()

    def _wait(self, seconds: float, is_in_a_hurry: Callable[[], bool]) -> bool:
        """Return whether all have ended within so many seconds."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() > deadline or is_in_a_hurry():
                return False
            time.sleep(0.05)
        return True

    def _kill(self) -> None:
        """With what they have started, which is in their process groups."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device or a disk that is gone
                process.wait(timeout=30)
