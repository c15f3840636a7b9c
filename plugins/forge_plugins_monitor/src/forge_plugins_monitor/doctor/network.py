"""How this host is reached by others, as far as one can see from here. ``together`` measures it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from forge_core.config.sections import DEFAULT_LEAD
from forge_core.contracts.check import CheckContext, Finding
from forge_core.distributed.environment import interface_problem

_TORCH_SHUTDOWN = 30.0
"""Seconds that torchrun gives its ranks after a signal, by default."""


def look(_: CheckContext) -> Iterator[Finding]:
    """Names, interfaces, and what a launcher has set."""
    yield _own_name()
    yield from _interfaces()
    problem = interface_problem(os.environ)
    if problem:
        yield Finding("interfaces asked for", "wrong", problem, "set it to one of these, or not at all")
    elif (nccl := os.environ.get("NCCL_SOCKET_IFNAME")) and not os.environ.get("GLOO_SOCKET_IFNAME"):
        found = f"NCCL_SOCKET_IFNAME={nccl}, and GLOO_SOCKET_IFNAME is not set"
        advice = "set both: ranks agree and save over gloo, which takes the interface that the host's name leads to"
        yield Finding("interfaces asked for", "warning", found, advice)
    yield from launcher(os.environ)


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        advice = "put it into /etc/hosts, or set GLOO_SOCKET_IFNAME: ranks tell each other where they are by name"
        return Finding("host name", "warning", f"{name} leads nowhere: {error.strerror}", advice)
    found = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        advice = "for several hosts, mend /etc/hosts, or set GLOO_SOCKET_IFNAME; for one it does not matter"
        return Finding("host name", "warning", f"{found}, where no other host can reach it", advice)
    return Finding("host name", "fine", found)


def _interfaces(root: Path = Path("/sys/class")) -> Iterator[Finding]:
    found = []
    for _, name in socket.if_nameindex():
        state, speed = _read(root / "net" / name / "operstate"), _read(root / "net" / name / "speed")
        rate = f" {int(speed) / 1000:g} Gbit/s" if speed.isdecimal() else ""
        found.append(f"{name} {state or 'unknown'}{rate}")
    yield Finding("interfaces", "fine", ", ".join(found))
    ports = sorted(root.glob("infiniband/*/ports/*"))
    if ports:
        states = [_read(port / "state").partition(": ")[2] for port in ports]
        words = [f"{port.parts[-3]} {state} {_read(port / 'rate')}" for port, state in zip(ports, states, strict=True)]
        if "ACTIVE" in states:
            yield Finding("InfiniBand", "fine", ", ".join(words))
        else:
            yield Finding("InfiniBand", "warning", ", ".join(words), "no port is active: NCCL will go over TCP")


def launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Of torchrun: whether its ranks have the time to save when they are told to stop."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    text = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else _TORCH_SHUTDOWN
    found = f"kills its ranks {seconds:g} s after it has passed on a signal"
    if seconds < DEFAULT_LEAD:
        advice = "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 before torchrun, or a run cannot save when it is stopped"
        yield Finding("torchrun", "warning", found, advice)
    else:
        yield Finding("torchrun", "fine", found)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
