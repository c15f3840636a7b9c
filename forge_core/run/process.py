"""This process: what its garbage collector skips, how its allocator keeps memory, how it ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Keep the imports of this context out of garbage collection: they are not searched for garbage now, which takes a
    fifth of the time that importing torch takes, nor ever after. Ctrl-C ends this process at once meanwhile: an error
    that is raised while torch is loaded may be dropped there, and is a page long where it is not."""
    was_enabled, handler = gc.isenabled(), signal.getsignal(signal.SIGINT)
    gc.disable()
    with suppress(ValueError):  # in another thread than the main one
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is signal.default_int_handler else handler)
    try:
        yield
    finally:
        gc.freeze()
        with suppress(ValueError):
            signal.signal(signal.SIGINT, handler)
        if was_enabled:
            gc.enable()


def hard_exit(code: int = 0) -> NoReturn:
    """End this process now, and do not unload torch: its threads sometimes wait, or abort the process, when it has had
    a process group. What has been registered with ``atexit`` is not called."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, closed, or without a reader
            stream.flush()
    os._exit(code)


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
    import ctypes  # here, as every command imports this module
    import platform

    is_told = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if is_told or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_TRIM_THRESHOLD, 2**31 - 1) and library.mallopt(_MMAP_THRESHOLD, 2**30))
