"""A process of ``forge convert`` beside a rank that trains.

``python -m forge_plugins_hf.export_process PARENT COMMAND…`` becomes COMMAND, gives way to others, and dies when PARENT
does (Linux): what it had written would be in the way of the run that takes the place of a killed one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h; it outlives exec
_PRIORITY = 10
_MOST_SAID = 500
"""Characters of an error that are told."""


class ExportProcess:
    """Writes one checkpoint as a folder of Hugging Face.

    Args:
        checkpoint: the folder to read.
        out: the folder to write, whole or not at all.
        options: of ``forge convert``.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, checkpoint: Path, out: Path, options: Sequence[str]) -> None:
        self._began = time.monotonic()
        convert = ["convert", str(checkpoint), "--to", "huggingface", "--out", str(out), *options]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe without a reader would hold the process up
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), sys.executable, "-m", "forge_core", *convert],
            # a tensor at a time needs no GPU, nor the cores on which the run may be training
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C is for the run, which says what becomes of the export
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._began

    def problem(self) -> str:
        """Why it has failed; empty if it has not. Call it once, when it has ended."""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        self._said.close()
        if self._process.returncode == 0:
            return ""
        if self._process.returncode < 0:
            return f"its process was ended by {signal.Signals(-self._process.returncode).name}"
        sentence = said.rpartition("error: ")[2] or f"exit code {self._process.returncode}"
        return sentence[:_MOST_SAID]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._said.close()


def become(parent: int, command: list[str]) -> None:
    """Does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it may have died before the kernel was asked
        sys.exit(1)
    os.nice(_PRIORITY)
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
