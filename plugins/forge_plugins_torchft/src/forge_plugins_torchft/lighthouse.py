"""``python -m forge_plugins_torchft.lighthouse BIND MIN_REPLICAS JOIN_TIMEOUT HEARTBEAT_TIMEOUT``: a lighthouse.

It prints its address, and ends when its standard input does: with whoever has started it. It is a process of its own
for the lines that torchft prints with every step, which cannot be switched off.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from forge_core.errors import ConfigError
from forge_plugins_torchft.config import TorchftConfig

_TICK = 50
"""Milliseconds after which it looks again whether there are enough."""


@contextmanager
def lighthouse(port: int | None, settings: TorchftConfig, heartbeat_timeout: float) -> Iterator[str]:
    """Start one for as long as the context lasts. Gives its URL.

    Args:
        port: where it listens, for other machines too; with ``None`` a free one, for this machine only.
        heartbeat_timeout: seconds without a sign of life after which the others go on without a replica.

    Raises:
        ConfigError: it cannot be started.
    """
    bind = f"[::]:{port}" if port else "127.0.0.1:0"
    arguments = [bind, str(settings.min_replicas), str(settings.join_timeout), str(heartbeat_timeout)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "forge_plugins_torchft.lighthouse", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:  # closes its standard input, and waits
        address = process.stdout.readline().strip()
        if not address:
            raise ConfigError(f"--port: no lighthouse can listen on {bind}; another program may")
        yield address if port else f"http://127.0.0.1:{urlsplit(address).port}"


def main(bind: str, min_replicas: str, join_timeout: str, heartbeat_timeout: str) -> None:
    """Serve until the standard input ends."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-untyped]  # it has no types

    server = LighthouseServer(
        bind=bind,
        min_replicas=int(min_replicas),
        join_timeout_ms=int(1000 * float(join_timeout)),
        quorum_tick_ms=_TICK,
        heartbeat_timeout_ms=int(1000 * float(heartbeat_timeout)),
    )
    print(server.address(), flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
