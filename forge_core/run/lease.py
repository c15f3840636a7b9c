"""Who is training in a run's directory: one attempt at a time, over all hosts that share it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from forge_core.checkpoint.fsync import make_folder
from forge_core.config.regular_file import read_regular_file
from forge_core.distributed.cluster import JOB
from forge_core.distributed.process_identity import Process
from forge_core.errors import ConfigError, LeaseLostError

FILE_NAME = "lease.json"
BEAT = 1.0
"""Seconds between signs of life."""
SILENCE = 10.0
"""Seconds without one after which the holder is taken for dead, if its process cannot be looked at."""
_MAX_BYTES = 2**16
SHOWS_AFTER = 60.0
"""Seconds after which a new file is seen on every host: on NFS, what a folder holds may be remembered for a minute."""


@attrs.frozen
class Holder:
    """An attempt at a run."""

    attempt: str
    host: str
    machine: str
    """Boot and process namespace: where the process number means something."""
    process: int
    started: str
    """When that process started, so that a number used again is not mistaken for it."""
    job: str
    """The job's number at the cluster's scheduler, or empty."""

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.process} on {self.host}{job}"

    @property
    def identity(self) -> Process:
        """Tells whether it still runs."""
        return Process(self.machine, self.process, self.started)


Sign = tuple[Holder, int]
"""A sign of life: whose, and which."""


class Lease:
    """Held by rank 0 from before the run's directory is first written to until the run ends.

    A lease is a file that its holder writes to every second. A holder that a file system or a debugger has stopped may
    lose it, and must look before it commits; once lost it does not come back, also not when the one who took it has
    ended. Clocks of different hosts are not compared: a second attempt watches whether the sign of life changes.

    Args:
        report: told whose lease has been taken over.
        ended: what ``refuse_if_held`` has found out, so that no process is watched twice.

    Raises:
        ConfigError: from the constructor, if another attempt holds it.
    """

    def __init__(self, run_directory: Path, report: Callable[[str], None], ended: Sign | None = None) -> None:
        self._path = run_directory / FILE_NAME
        this = Process.this()
        self._own = Holder(
            uuid.uuid4().hex, socket.gethostname(), this.machine, this.number, this.started, os.environ.get(JOB, "")
        )
        self.attempt = self._own.attempt
        self._ended = threading.Event()
        self._is_lost = False
        self._take(report, ended)
        self._thread = threading.Thread(target=self._beat, name="forge-lease", daemon=True)
        self._thread.start()

    def refuse_if_lost(self) -> None:
        """Look now.

        Raises:
            LeaseLostError: another attempt has taken the run over.
        """
        if not self._is_held():
            found = _read(self._path)
            silent = f"as this one had not given a sign of life for {SILENCE:.0f} s; nothing more is written here"
            if found:
                raise LeaseLostError(f"another attempt ({found[0]}) has taken over {self._path.parent}, {silent}")
            raise LeaseLostError(
                f"{self._path.absolute()} is gone: removed, or another attempt has had the run and ended, {silent}"
            )

    def give_back(self) -> None:
        """Called when the run ends; what a killed process leaves is found out by the next one."""
        self._ended.set()
        self._thread.join()
        if self._is_held():
            self._path.unlink(missing_ok=True)

    def _take(self, report: Callable[[str], None], ended: Sign | None) -> None:
        make_folder(self._path.parent)
        with suppress(FileExistsError):
            with self._path.open("x") as file:
                file.write(self._sign(0))
            return
        if self._path.is_symlink():
            raise ConfigError(f"{self._path} is a link, which is not followed; remove it, or choose another run.name")
        found = _read(self._path)
        if found is not None:
            if found != ended:
                _refuse_if_alive(self._path, found)
            report(f"taking over from {found[0]}, which has ended without giving the run back")
        _write(self._path, self._sign(0))
        time.sleep(BEAT / 2)  # whoever has had the same idea has written by now, and the last one stays
        self.refuse_if_lost()

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT):
            count += 1
            try:
                if not self._is_held():
                    return
                _write(self._path, self._sign(count))
            except OSError:
                continue  # a full or absent disk is the saver's to report; the next beat may succeed

    def _is_held(self) -> bool:
        """A file that is gone has been taken, and given back by whoever took it."""
        found = _read(self._path)
        self._is_lost |= found is None or found[0] != self._own
        return not self._is_lost

    def _sign(self, count: int) -> str:
        return json.dumps({**attrs.asdict(self._own), "beat": count})


def refuse_unless_shared(run_directory: Path, attempt: str) -> None:
    """Called on every rank once the first one holds the lease.

    Raises:
        ConfigError: this rank does not see the directory that the first one writes to.
    """
    deadline = time.monotonic() + SHOWS_AFTER
    path = run_directory / FILE_NAME
    while (found := _read(path)) is None or found[0].attempt != attempt:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run.dir: {socket.gethostname()} does not see {path}, which rank 0 has written. All ranks "
                "write to the run's directory, so it has to be on a file system that all nodes share; disks of their "
                "own will do for a single node, with checkpoint.mirror."
            )
        time.sleep(0.2)


def refuse_if_held(run_directory: Path) -> Sign | None:
    """Look whether somebody is training there, without writing anything.

    Returns:
        The last sign of life of a holder that has ended, if there is one.

    Raises:
        ConfigError: somebody is, or there is no telling.
    """
    path = run_directory / FILE_NAME
    try:
        found = _read(path)
        if found is not None:
            _refuse_if_alive(path, found)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read, which says who trains there: {error.strerror}") from error
    return found


def _refuse_if_alive(path: Path, found: Sign) -> None:
    who, _ = found
    is_alive = who.identity.is_running if who.identity.is_here else _changes(path, found)
    if is_alive:
        raise ConfigError(f"another process is training in {path.parent}: {who}; stop it, or choose another run.name")


def _changes(path: Path, found: Sign) -> bool:
    """Return whether a sign of life comes within ``SILENCE`` seconds."""
    deadline = time.monotonic() + SILENCE
    while time.monotonic() < deadline:
        time.sleep(BEAT / 4)
        if (now := _read(path)) != found:
            return now is not None  # else it was given back while we waited
    return False


def _read(path: Path) -> Sign | None:
    """A file that is being written to may be read half: then again, and if it stays so, it holds nothing."""
    for _ in range(5):
        try:
            entry: Mapping[str, Any] = json.loads(read_regular_file(path, _MAX_BYTES, follow_link=False))
            fields = {name: entry[name] for name in (field.name for field in attrs.fields(Holder))}
            return Holder(**fields), int(entry["beat"])
        except (FileNotFoundError, NotADirectoryError):  # of the latter, the run's directory speaks
            return None
        except (ValueError, KeyError, TypeError):
            time.sleep(0.02)
    return None


def _write(path: Path, text: str) -> None:
    """Into the same file: on NFS, opening a name that now means another file may show the old one for a minute."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.pwrite(handle, text.encode(), 0)
        os.ftruncate(handle, len(text.encode()))
        os.fsync(handle)
    finally:
        os.close(handle)
