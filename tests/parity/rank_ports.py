"""Ports for ranks that tests start."""

from __future__ import annotations

import contextlib
import socket
from random import SystemRandom


def free_ports(count: int = 1) -> int:
    """Return the first of ``count`` ports in a row on which no program listens.

    They are below those that the system gives to connections (32,768 and up on Linux). One of these may be taken by any
    connection before rank 0 listens on it.
    """
    for first in SystemRandom().sample(range(20_000, 30_000), 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                one = stack.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free block of ports")
