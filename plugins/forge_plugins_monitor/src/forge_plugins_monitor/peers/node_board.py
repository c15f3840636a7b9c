"""The board of a node: a file for each of its ranks, in which the others read how it is. No network is needed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from forge_core.distributed.process_identity import Process
from forge_core.errors import ConfigError

VERDICT = "verdict"
"""The file for who is lost."""
ASKED = "asked"
"""The file for whether a rank, of this node or another, wants to know where the others are."""
_RECORD = 4096
"""Bytes. A file has its size from the start: it is overwritten in place, also on a disk that has become full."""


class NodeBoard:
    """A folder in the temporary directory. The ranks that see the same one are a node.

    Args:
        name: of the group of ranks; no other group has it.

    Raises:
        ConfigError: the temporary directory cannot be written.
    """

    def __init__(self, name: str) -> None:
        temporary, prefix = Path(tempfile.gettempdir()), f"forge-ranks-{socket.gethostname()}-"
        self._folder = temporary / f"{prefix}{name}"
        for folder in temporary.glob(f"{prefix}*"):
            _remove_if_left_over(folder)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self.write(VERDICT, self.read(VERDICT))  # it will be needed when the disk may be full
        except OSError as error:
            raise ConfigError(
                f"{temporary}, where the ranks of a node tell each other how they are, cannot be written: "
                f"{error.strerror}; set TMPDIR to another folder"
            ) from error

    def ranks(self) -> list[int]:
        """List the ranks that have written, in ascending order."""
        return sorted(int(file.name) for file in self._folder.iterdir() if file.name.isdecimal())

    def write(self, name: str, said: Any) -> None:
        """Put up JSON values, in place of the ones before."""
        record = json.dumps(said).encode().ljust(_RECORD)
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, record, 0)
            os.ftruncate(file, len(record))
        finally:
            os.close(file)

    def read(self, name: str) -> Any:
        """Return what was put up last; ``None`` where there is nothing, or it is being written at this moment."""
        return _read(self._folder / name)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def _remove_if_left_over(folder: Path) -> None:
    """Ranks that are killed leave their board. Folders of other users, and what is no record, stay."""
    try:
        signs = [_read(file) for file in folder.glob("[0-9]*")]
        has_ended = folder.stat().st_uid == os.getuid() and all(Process(**one["process"]).has_ended for one in signs)
    except (OSError, TypeError, KeyError):
        return
    if signs and has_ended:
        shutil.rmtree(folder, ignore_errors=True)
