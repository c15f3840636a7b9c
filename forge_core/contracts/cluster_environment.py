"""Cluster environments: a cluster's own variables, read from the environment of a process that it has started.

``forge run`` asks them before torch is imported, so their modules may not import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ClusterEnvironment:
    """Base class. Knows of no cluster; override what yours can tell.

    Every method is given the process' environment and changes nothing in it. One whose variables are half set raises a
    ``ConfigError`` that says which.
    """

    title: str = ""
    """The cluster's name in messages: ``"Slurm"``."""

    def detect(self, environment: Mapping[str, str]) -> bool:
        """True if the cluster has started this process or the script that did. Nothing else is asked otherwise."""
        return False

    def ranks(self, environment: Mapping[str, str]) -> Mapping[str, str] | None:
        """The variables that torchrun would set for a task that is one of several: ``RANK``, ``WORLD_SIZE``,
        ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT`` and, where it is known, ``LOCAL_WORLD_SIZE``.

        ``None`` for anything else, such as a batch script. What is set already stays; a ``RANK`` or ``WORLD_SIZE`` that
        contradicts the cluster's is for this method to refuse.
        """
        return None

    def is_launched(self, environment: Mapping[str, str]) -> bool:
        """True if the cluster's launcher is the parent of this process, which then ends with it."""
        return False

    def check_torchruns(self, environment: Mapping[str, str], hosts: str) -> None:
        """Refuse a torchrun that has been told of another number of hosts than the cluster has started torchruns."""

    def job(self, environment: Mapping[str, str]) -> str:
        """The job's number or name at the scheduler; empty if it has none."""
        return ""

    def end_time(self, environment: Mapping[str, str]) -> float | None:
        """When the cluster ends the job, in seconds since 1970."""
        return None

    def explain(self, error: Exception) -> str | None:
        """A sentence to print below ``error``, with which ranks have not come together."""
        return None


NO_CLUSTER = ClusterEnvironment()
"""Outside of every cluster that a plugin describes."""


class ClusterEnvironmentFactory(Protocol):
    """The signature of the factory that a description names. No key chooses it: the config has defaults for all."""

    def __call__(self, config: Any, /) -> ClusterEnvironment:
        """Build it. It is called for every process, on a cluster or not."""
