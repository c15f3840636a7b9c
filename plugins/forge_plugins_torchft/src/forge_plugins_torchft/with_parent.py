"""``python -m forge_plugins_torchft.with_parent PARENT COMMAND…``: become COMMAND, and die when PARENT does (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h; it outlives exec


def become(parent: int, command: list[str]) -> None:
    """Does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it may have died before the kernel was asked
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
