"""Standard output belongs to the command, whose JSON or TOML somebody may read: what plugins print goes elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def output_of(plugin: str) -> Iterator[None]:
    """Send prints of this context to the error stream, each line with the plugin's name."""
    named = _Named(plugin)
    with redirect_stdout(named):
        try:
            yield
        finally:
            named.end_line()


class _Named(io.TextIOBase):
    """It may be kept, by a log handler that is made while a module is imported, and goes on writing there."""

    def __init__(self, plugin: str) -> None:
        self._plugin = plugin
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            sys.stderr.write(f"{self._plugin}: {line}\n")
        return len(text)

    def end_line(self) -> None:
        if self._line:
            self.write("\n")
