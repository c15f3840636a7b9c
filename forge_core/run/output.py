"""Standard output and error of a run. What shows a run may fail; the run may not."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import AbstractContextManager, suppress
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""The reader is gone: the program behind a pipe has ended, the terminal is closed."""


class LossyOutput(AbstractContextManager[None]):
    """Drops what cannot be written, whoever prints it: us, a progress bar, a callback, a warning.

    A stream that was closed when the process started (``>&-``) leads to nowhere, so that no file of the run is opened
    in its place.
    """

    def __enter__(self) -> None:
        self._before = sys.stdout, sys.stderr
        _fill_standard_places()
        sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before


class _Lossy:
    """A text stream, otherwise as it was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Drop everything from here on if the reader is gone: also what is buffered, and what is written past us."""
        if error.errno in _GONE:
            with suppress(OSError):
                _lead_to_nowhere(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lossy(stream: TextIO | None) -> Any:
    """It has everything that a stream has."""
    return _Lossy(open(os.devnull, "w") if stream is None else stream)  # noqa: PTH123 - to the very end


def _fill_standard_places() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _lead_to_nowhere(descriptor)


def _lead_to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == descriptor:
        os.set_inheritable(descriptor, True)
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
