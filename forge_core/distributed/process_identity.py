"""The identity of a process on any machine, and a test that it still runs, where this can be seen."""

from __future__ import annotations

import os
from pathlib import Path

import attrs


@attrs.frozen
class Process:
    """The identity of a process, to be remembered by another one."""

    machine: str
    """Boot and process namespace: where the number means something. Empty where there is no telling."""
    number: int
    started: str
    """When it started, so that a number used again is not mistaken for it."""

    @classmethod
    def this(cls) -> Process:
        return cls(_machine(), os.getpid(), _start_of(os.getpid()))

    @property
    def is_here(self) -> bool:
        """Return whether this process could see it."""
        return self.machine != "" and self.machine == _machine()

    @property
    def is_running(self) -> bool:
        """Only of a process that is here."""
        return _start_of(self.number) == self.started

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended, as far as this machine can see."""
        return self.is_here and not self.is_running


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""  # no Linux: no process is taken for being here


def _start_of(process: int) -> str:
    """In ticks since boot; empty if there is no such process, or only what is left of one."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
