"""The end of a process that has been a rank."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int = 0) -> NoReturn:
    """End this process now, and do not unload torch: its threads sometimes wait, or abort the process, when it has had
    a process group. What has been registered with ``atexit`` is not called."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
