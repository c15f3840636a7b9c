"""A file of lines that only grows. What it cannot take for now is kept, and written when it can."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

MOST_KEPT = 16 * 2**20
"""Bytes of lines that wait in memory for a disk that is full or fails."""


class LineFile:
    """Any thread may use it. What a crash has left of a last line is cut off when it is opened.

    Raises:
        OSError: from the constructor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # a link that somebody else has put there is not followed
        self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._waiting = bytearray()
        self._dropped = 0
        self._lock = threading.Lock()
        try:
            _cut_off_torn_line(self._file)
        except OSError:
            os.close(self._file)
            raise

    def append(self, line: str) -> None:
        """Raises ``OSError`` if nothing can be written for now: the line is kept, and written with a later one."""
        with self._lock:
            if self._file is None:
                return  # another thread still had something to say
            text = line.encode(errors="replace") + b"\n"
            if len(self._waiting) + len(text) > MOST_KEPT:
                self._dropped += 1
                self._write()
                self._dropped -= 1  # there is room again
            self._waiting += text
            self._write()

    def sync(self) -> None:
        """Make the appended lines survive a power cut. Raises ``OSError`` if it does not."""
        with self._lock:
            if self._file is not None:
                self._write()
                os.fsync(self._file)

    def close(self) -> int:
        """Returns how many lines could not be written."""
        with self._lock:
            with suppress(OSError):  # said when lines were kept
                self._write()
            if self._file is not None:
                os.close(self._file)
            self._file = None  # its number may be that of another file soon
            return self._dropped + self._waiting.count(b"\n")

    def _write(self) -> None:
        while self._waiting and self._file is not None:
            written = os.write(self._file, self._waiting)
            del self._waiting[:written]


def _cut_off_torn_line(file: int) -> None:
    start = end = os.fstat(file).st_size
    newline = -1
    while start > 0 and newline < 0:
        start = max(0, start - 4096)
        newline = os.pread(file, 4096, start).rfind(b"\n")
    if start + newline + 1 < end:
        os.ftruncate(file, start + newline + 1)
