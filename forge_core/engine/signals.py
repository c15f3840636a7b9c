"""Signals ask a run to save and stop."""

from __future__ import annotations

import _thread
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from forge_core.contracts.callback import Requests


@contextmanager
def stop_on_signals(requests: Requests, say: Callable[[str], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGUSR1 ask the run to save and stop; a second SIGINT ends it at once.

    The others do not, since Slurm and torchrun say the same thing several times: SIGUSR1 and SIGTERM together, SIGTERM
    again at the end of a grace time, and what torchrun passes on after the ranks have got it themselves.
    """

    def handle(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if requests.stop:
            if number == signal.SIGINT:
                sys.exit(128 + number)
            return
        requests.stop = name
        more = "; once more leaves at once" if number == signal.SIGINT else ""
        # In a thread: this one may be in the middle of a line, of which the file allows no second one at once. And
        # without `threading`, of whose locks this one may hold one.
        _thread.start_new_thread(say, (f"{name}: will save and stop after this step{more}",))

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
