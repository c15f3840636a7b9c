"""How far a long command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts bytes of input and tokens of output, and shows them on ``stream`` (standard error by default)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._tokens = 0
        self._done = self._total = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Bar | None = None
        if self._stream.isatty():
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task("preparing", total=None, speed="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def begin(self, total: int, done: int) -> None:
        """Work of ``total`` bytes starts, of which ``done`` have been read before."""
        self._total, self._done = total, done
        self._started = self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, total=total, completed=done, speed="")

    def advance(self, size: int, tokens: int) -> None:
        """``size`` more bytes have become ``tokens`` tokens."""
        self._done += size
        self._tokens += tokens
        now = time.monotonic()
        speed = f"{self._tokens / 1e6:,.1f} M tokens, {self._tokens / 1e6 / max(now - self._started, 1e-9):.1f} M/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, speed=speed)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._last_line = now
            self.say(f"{self._done / 2**20:,.1f} of {self._total / 2**20:,.1f} MiB, {speed}")
