"""Memory of a CPU run, between steps."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""


def keep_freed_memory() -> bool:
    """Have the allocator of this process keep what is freed, up to 2 GiB and in pieces of up to 1 GiB.

    Each step of training frees all its gradients. glibc gives them back to the system, which clears every page before
    the next step gets it: for a sparse layer of 64 experts on a CPU, a fifth of the time (``benchmarks/moe.py``).

    Returns:
        Whether it will: not without glibc, nor if the environment tells it what to do (``GLIBC_TUNABLES``,
        ``MALLOC_…``).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_TRIM_THRESHOLD, 2**31 - 1) and library.mallopt(_MMAP_THRESHOLD, 2**30))
