"""A process that has imported torch and forks ranks on demand: a trial then costs a fraction of a second, not ten.

Run as a module it is that process: a line of JSON on standard input starts ranks, a line with their process numbers
answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from forge_core.run.process import hard_exit


class Rank:
    """A forked process; the number of one that has ended is not mistaken for another's."""

    def __init__(self, process: int) -> None:
        self.process = process
        self._handle = os.pidfd_open(process)
        self._end = select.poll()  # select.select takes no descriptor beyond 1023
        self._end.register(self._handle, select.POLLIN)

    @property
    def is_running(self) -> bool:
        return not self.wait(0)

    def send(self, number: int) -> None:
        if self.is_running:
            signal.pidfd_send_signal(self._handle, number)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within that time."""
        return bool(self._end.poll(1000 * seconds))

    def close(self) -> None:
        os.close(self._handle)


class Zygote:
    """The parent of all ranks. What it starts ends with it, and it ends with whoever started it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        )

    def start(self, ranks: int, function: str, scratch: Path, **arguments: Any) -> list[Rank]:
        """Call ``function`` (``"module:name"``) in so many new processes, with ``rank``, ``ranks``, ``scratch`` and
        ``arguments``. What they print is in ``scratch/rank<r>.log``."""
        order = {"ranks": ranks, "function": function, "scratch": str(scratch), "arguments": arguments}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return [Rank(process) for process in json.loads(self._process.stdout.readline())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def end(ranks: Sequence[Rank], seconds: float = 60) -> list[int]:
    """Wait for all; those that have not ended by then are killed, and returned."""
    deadline = time.monotonic() + seconds
    stuck = [rank for rank in ranks if not rank.wait(max(0.0, deadline - time.monotonic()))]
    for rank in stuck:
        rank.send(signal.SIGKILL)
    for rank in ranks:
        rank.wait(10)
        rank.close()
    return [rank.process for rank in stuck]


def _serve() -> None:
    import torch.distributed.checkpoint  # for all of them

    torch.set_num_threads(1)
    _die_with_parent()
    for line in sys.stdin:
        _forget_ended()
        order = json.loads(line)
        importlib.import_module(order["function"].partition(":")[0])  # here, once, rather than in each rank
        print(json.dumps([_fork(order, rank) for rank in range(order["ranks"])]), flush=True)


def _forget_ended() -> None:
    """Before the next order and no sooner, so that a rank that ends at once has a number until it is looked for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork(order: dict[str, Any], rank: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _die_with_parent()
        scratch = Path(order["scratch"])
        log = os.open(scratch / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((0, nothing), (1, log), (2, log)):
            os.dup2(new, old)
        module, _, name = order["function"].partition(":")
        getattr(importlib.import_module(module), name)(rank, order["ranks"], scratch, **order["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001 - a fork of the server must not go on as the server
        traceback.print_exc()
    finally:
        hard_exit(code)


def _die_with_parent() -> None:
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
