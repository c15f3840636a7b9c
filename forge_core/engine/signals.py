"""Signals ask a run to save and stop."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from forge_core.contracts.callback import Requests


@contextmanager
def stop_on_signals(requests: Requests, say: Callable[[str], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the run to save and stop; the second ends it at once."""

    def handle(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if requests.stop:
            sys.exit(128 + number)
        requests.stop = name
        say(f"{name}: will save and stop after this step; once more leaves at once")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
