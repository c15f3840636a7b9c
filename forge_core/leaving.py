"""The end of a process that has been a rank."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int = 0) -> NoReturn:
    """End this process now, and do not unload torch: its threads sometimes wait, or abort the process, when it has had
    a process group. What has been registered with ``atexit`` is not called."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
    os._exit(code)
