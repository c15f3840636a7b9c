"""Real processes over gloo: one launch for all the checks of a file, since starting costs more than checking."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fork_server


@pytest.fixture
def run_ranks() -> Callable[..., list[str]]:
    """Run a Python file in ``world_size`` ranks; returns what each printed, or fails with what it said."""

    def run(script: Path, world_size: int, *arguments: object, timeout: float = 120) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        ranks = [
            fork_server.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            said = [rank.communicate(timeout=timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        errors = [
            f"[rank {i}] {err[-3000:]}"
            for i, (rank, (_, err)) in enumerate(zip(ranks, said, strict=True))
            if rank.returncode
        ]
        assert not errors, "\n".join(errors)
        return [out for out, _ in said]

    return run
