"""Whether token files still hold what was written, by the checksums beside them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from forge_core.errors import ConfigError

_BLOCK = 2**22


def damage_of(file: Path, sha256: str) -> str | None:
    """A sentence, if the checksum of ``file`` is another one."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as content:  # not by its mapping: a file that shrinks meanwhile would end the process
            while block := content.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    if digest.hexdigest() == sha256:
        return None
    return (
        f"{file} is damaged: its checksum is not the one of its JSON, so its ids are not the ones that were prepared; "
        "copy it again, or prepare the data again"
    )


class Verification:
    """Compares each file once: those first that are read first, in a thread that gives way to all others.

    Args:
        checksums: SHA-256 by file.
        before: all at once, before the first step, instead.
    """

    def __init__(self, checksums: Mapping[str, str], *, before: bool) -> None:
        self._checksums = dict(checksums)
        self._before = before
        self._report: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._touched: dict[str, None] = {}
        self._thread: threading.Thread | None = None

    def refuse_damaged(self) -> None:
        """Raises:
        ConfigError: the first file that is damaged, if all are to be looked at before.
        """
        if self._before:
            for file in [*self._checksums]:
                if problem := damage_of(Path(file), self._checksums.pop(file)):
                    raise ConfigError(problem)

    def watch(self, report: Callable[[str], None]) -> None:
        """From the first read on, tell ``report`` of every file that is damaged."""
        self._report = report

    def touch(self, files: Collection[str]) -> None:
        """They are being read."""
        if self._report is None or not self._checksums:
            return
        with self._lock:
            self._touched.update(dict.fromkeys(files))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="forge-data-verification", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until all have been compared."""
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        with suppress(OSError, AttributeError):  # not everywhere can a thread be slower than its process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        assert self._report is not None, "it is watched"
        while (file := self._next()) is not None:
            if problem := damage_of(Path(file), self._checksums[file]):
                self._report(problem)
            with self._lock:
                del self._checksums[file]

    def _next(self) -> str | None:
        """One that has been read, else any: other ranks may read it."""
        with self._lock:
            read = next((file for file in self._touched if file in self._checksums), None)
            return read or next(iter(self._checksums), None)
