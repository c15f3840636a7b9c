"""What only all ranks can find out: whether they come together, and how fast they are when they talk."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from forge_core.contracts.check import Finding
from forge_core.distributed.mesh import choose_device, join_process_group
from forge_plugins_monitor.doctor.storage import nearest_existing

_SECONDS = 120.0
_TIMES = 20
_VISIBLE_SECONDS = 60.0
"""NFS may show what it has seen of a folder for so long."""
_SLOW_SECONDS = 0.05
"""For 1 MiB: what a step can bear; a healthy network takes a hundredth of it."""


def look_together(run_dir: Path, look: Callable[[], Sequence[Finding]]) -> list[Finding]:
    """Called on every rank that a launcher has started.

    Args:
        run_dir: where runs will be written.
        look: the checks of one host, done on one rank of each.

    Returns:
        The findings of all hosts, with the hosts where they differ; on every rank the same.

    Raises:
        ForgeError: the ranks do not come together; says where they tried and why.
    """
    device = choose_device("auto")
    join_process_group(device, _SECONDS)
    try:
        measured = [*_measure(device), _visibility(run_dir)]
        own = look() if os.environ.get("LOCAL_RANK") == "0" else None
        of_ranks: list[tuple[str, Sequence[Finding] | None]] = [("", None)] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (socket.gethostname(), own))
    finally:
        dist.destroy_process_group()
    return [*measured, *merged([(host, found) for host, found in of_ranks if found is not None])]


def merged(of_hosts: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """One line where all hosts found the same, otherwise one for each, with its name."""
    lines: dict[Finding, list[str]] = {}
    for host, found in of_hosts:
        for finding in found:
            lines.setdefault(finding, []).append(host)
    result = []
    for finding, hosts in lines.items():
        everywhere = len(hosts) == len(of_hosts)
        where = "" if everywhere else f"{', '.join(hosts)}: "
        result.append(Finding(finding.subject, finding.state, f"{where}{finding.found}", finding.advice))
    return result


def _measure(device: torch.device) -> Iterator[Finding]:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    each = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    yield Finding("ranks", "fine", f"{len(hosts)} on {', '.join(f'{host} ({count})' for host, count in each.items())}")
    yield _all_reduce("all-reduce, CPU", torch.device("cpu"))
    if device.type == "cuda":
        yield _all_reduce("all-reduce, GPU", device)


def _all_reduce(subject: str, device: torch.device) -> Finding:
    """The slowest rank's mean time for 1 MiB and rate for 64 MiB; the first ones set up connections."""
    seconds = {}
    for n_bytes in (2**20, 2**26):
        values = torch.ones(n_bytes // 4, device=device)
        dist.all_reduce(values)
        _wait_for(device)
        started = time.perf_counter()
        times = _TIMES if n_bytes == 2**20 else 2
        for _ in range(times):
            dist.all_reduce(values)
        _wait_for(device)
        mean = torch.tensor((time.perf_counter() - started) / times, device=device)
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        seconds[n_bytes] = float(mean)
    rate = 2**26 / seconds[2**26] / 1e9
    found = f"1 MiB in {seconds[2**20] * 1e3:.2f} ms, 64 MiB at {rate:.2f} GB/s"
    if seconds[2**20] > _SLOW_SECONDS:
        advice = "name the fast interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows a choice"
        return Finding(subject, "warning", found, advice)
    return Finding(subject, "fine", found)


def _visibility(run_dir: Path) -> Finding:
    """Return whether a file that rank 0 writes is seen by all others, and how soon."""
    path = nearest_existing(run_dir) / f".forge-doctor-{os.environ['MASTER_PORT']}-{os.getpid()}"
    told = [path.name]
    written = dist.get_rank() > 0 or _written(path)
    dist.broadcast_object_list(told, src=0)
    seen = path.with_name(told[0])
    started = time.perf_counter()
    while not seen.exists() and time.perf_counter() - started < _VISIBLE_SECONDS:
        time.sleep(0.01)
    answers: list[tuple[str, float | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(
        answers, (socket.gethostname(), time.perf_counter() - started if seen.exists() and written else None)
    )
    if dist.get_rank() == 0:
        path.unlink(missing_ok=True)
    blind = sorted({host for host, waited in answers if waited is None})
    if blind:
        advice = "choose a run.dir that all hosts share: checkpoints are written by all ranks into one folder"
        return Finding("shared run.dir", "wrong", f"{', '.join(blind)} do not see what is written there", advice)
    slowest = max(waited for _, waited in answers if waited is not None)
    return Finding("shared run.dir", "fine", f"all ranks see a new file there within {slowest:.2f} s")


def _written(path: Path) -> bool:
    try:
        path.write_text("")
    except OSError:
        return False  # `storage` says why
    return True


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
