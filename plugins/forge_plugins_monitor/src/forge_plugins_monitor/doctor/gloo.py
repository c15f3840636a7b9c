"""Whether two processes on this machine can work together at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

from forge_core.contracts.check import CheckContext, Finding
from forge_core.launch import hard_exit

_SECONDS = 60


def look(_: CheckContext) -> Iterator[Finding]:
    """Two processes that add a tensor over gloo, as ranks do in every step."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch forgets to export it

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-P", "-m", __name__, str(store.port)]
    processes = [
        subprocess.Popen([*command, str(rank)], env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=2 * _SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        yield Finding("gloo", "wrong", f"two processes did not find each other within {2 * _SECONDS} s", _ADVICE)
        return
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if all(process.returncode == 0 for process in processes):
        yield Finding("gloo", "fine", f"two processes add 4 KiB in {float(answers[0][0]) * 1e3:.2f} ms")
    else:
        said = next(err for (_, err), process in zip(answers, processes, strict=True) if process.returncode)
        yield Finding("gloo", "wrong", (said.strip().splitlines() or ["no answer"])[-1], _ADVICE)


_ADVICE = (
    "see that the host's own name leads to one of its addresses (getent hosts $(hostname)), or set GLOO_SOCKET_IFNAME "
    "to an interface that is up, such as lo"
)


def add(port: int, rank: int) -> None:
    """One of the two: prints the mean seconds of an all-reduce of 4 KiB."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as above

    timeout = timedelta(seconds=_SECONDS)
    store = TCPStore("localhost", port, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        ones = torch.ones(1024)
        dist.all_reduce(ones)
        if not bool((ones == 2).all()):
            sys.exit("one and one did not make two: all_reduce over gloo gives wrong values")
        times, started = 20, time.perf_counter()
        for _ in range(times):
            dist.all_reduce(ones)
        print((time.perf_counter() - started) / times)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    add(int(sys.argv[1]), int(sys.argv[2]))
    hard_exit()
