"""Signals ask a run to save and stop, or for its stacks: one set of rules for a rank and for the launcher of ranks."""

from __future__ import annotations

import _thread
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from forge_core.contracts.callback import Requests
from forge_core.errors import INTERRUPTED

LAUNCH_FOLDER = "FORGE_LAUNCH_FOLDER"
"""Environment variable in which the launcher of ``--nproc`` tells its ranks of a folder that it shares with them."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stop_on_signals(requests: Requests, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Each of ``STOPS`` asks the run to save and stop; a second Ctrl-C on a terminal ends it at once.

    Nothing else that comes again does, since schedulers and launchers say the same thing several times: SIGUSR1 and
    SIGTERM together, SIGTERM again at the end of a grace time, SIGINT to a launcher and to its ranks. SIGHUP, of a
    terminal that is closed, is left alone where it was ignored before, as ``nohup`` does.
    """

    def handle(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if requests.stop:
            if number == signal.SIGINT and (is_in_foreground() or _launcher_leaves()):
                sys.exit(INTERRUPTED)
            return
        requests.stop = name
        more = "; once more leaves at once" if number == signal.SIGINT and is_in_foreground() else ""
        # In a thread: this one may be in the middle of a line, of which the file allows no second one at once. And
        # without `threading`, of whose locks this one may hold one.
        _thread.start_new_thread(say, (f"{name}: will save and stop after this step{more}",))

    return _Handled(dict.fromkeys(_heeded(STOPS), handle))


@contextmanager
def stacks_on_quit() -> Iterator[None]:
    """SIGQUIT writes the stacks of all threads before it ends this process as always: to the error stream, or to a
    file for the launcher, which shows those of all ranks one after another."""
    with ExitStack() as files:
        descriptor: int = 2
        if folder := os.environ.get(LAUNCH_FOLDER):
            descriptor = files.enter_context(stacks_file(Path(folder), int(os.environ["RANK"])).open("w")).fileno()
        for number in _heeded([signal.SIGQUIT]):
            faulthandler.register(number, file=descriptor, all_threads=True, chain=True)
            files.callback(faulthandler.unregister, number)
        yield


class _Handled(AbstractContextManager[Any]):
    """No generator: one that is forgotten would end by itself, in a process that heeds signals to its very end."""

    def __init__(self, handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> None:
        self._handlers = handlers

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, handler) for number, handler in self._handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class SignalsForRanks(_Handled):
    """In the launcher: what it is told, and its ranks shall do. Nothing is done while a signal is handled but to
    remember it.

    As a context manager it takes the place of what signals did before.
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(_heeded([*STOPS, signal.SIGQUIT]), self._handle))
        self.stop: signal.Signals | None = None
        """The first one that asked to stop."""
        self.leaves = False
        """Ctrl-C has been pressed again, or SIGQUIT has come: the ranks are not waited for."""
        self.wants_stacks = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGQUIT:
            self.wants_stacks = self.leaves = True
        elif self.stop is None:
            self.stop = signal.Signals(number)
        elif number == signal.SIGINT and is_in_foreground():
            self.leaves = True


def is_in_foreground() -> bool:
    """Return whether a terminal sends this process its Ctrl-C. A signal does not say where it comes from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def leave_file(folder: Path) -> Path:
    """It is there once the launcher leaves at once, and its ranks shall with the next SIGINT."""
    return folder / "leave"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks for its launcher."""
    return folder / f"stacks_of_rank_{rank}"


def _launcher_leaves() -> bool:
    folder = os.environ.get(LAUNCH_FOLDER)
    return folder is not None and leave_file(Path(folder)).exists()


def _heeded(numbers: tuple[signal.Signals, ...] | list[signal.Signals]) -> list[signal.Signals]:
    """Without those of a terminal that whoever has started this process does not want it to hear."""
    of_terminal = (signal.SIGHUP, signal.SIGQUIT)
    return [n for n in numbers if n not in of_terminal or signal.getsignal(n) is not signal.SIG_IGN]
