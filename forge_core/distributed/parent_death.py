"""No rank outlives its launcher: it would train on, unseen, in the directory of the run that takes its place."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from forge_core.contracts.cluster_environment import NO_CLUSTER, ClusterEnvironment
from forge_core.errors import LostPeerError

LAUNCHER = "FORGE_LAUNCHER"
"""Environment variable in which the launcher of ``--nproc`` says its process number, which is also its torchrun id: a
torchrun started from one of its ranks has another."""

_PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h
_ADOPT_ORPHANS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit"}


def end_with_launcher(environment: Mapping[str, str], cluster: ClusterEnvironment = NO_CLUSTER) -> None:
    """From now on, the kernel kills this process when the one that started it dies, even of ``kill -9`` (Linux only).

    Of ranks that a person has started one by one, the shell may well end before they do: they are left alone.

    Raises:
        LostPeerError: the launcher has died already.
    """
    has_launcher = "TORCHELASTIC_RUN_ID" in environment or cluster.is_launched(environment)
    if sys.platform != "linux" or not has_launcher:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _is_orphan(environment):  # it may have died before the kernel was asked
        raise LostPeerError(f"rank {environment.get('RANK', '?')} has lost its launcher before it could start")


def _is_orphan(environment: Mapping[str, str]) -> bool:
    parent = os.getppid()
    if LAUNCHER in environment and environment[LAUNCHER] == environment.get("TORCHELASTIC_RUN_ID"):
        return environment[LAUNCHER] != str(parent)
    # Other launchers do not say their numbers. In a container, they may well be process 1.
    try:
        return Path(f"/proc/{parent}/comm").read_text().strip() in _ADOPT_ORPHANS
    except OSError:  # of another process namespace
        return False
