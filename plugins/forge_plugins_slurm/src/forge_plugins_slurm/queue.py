"""What Slurm's queue says about jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Collection

import attrs


@attrs.frozen
class QueuedJob:
    """A job that waits or runs."""

    state: str
    """Slurm's word: ``PENDING``, ``RUNNING``, ``COMPLETING``, …"""
    reason: str
    """Why it waits, or the nodes on which it runs."""


def queued_jobs(job_ids: Collection[str]) -> dict[str, QueuedJob] | None:
    """Those of the given jobs that are in the queue, by id; ``None`` if there is no Slurm, or it does not answer."""
    if not job_ids:
        return {}
    # All of the user's, since squeue refuses a list with a job in it that it has forgotten.
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i|%T|%R"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    # where SLURM_CLUSTERS is set, the cluster's name comes first
    lines = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") > 1]
    return {job: QueuedJob(state, reason) for job, state, reason in lines if job in job_ids}
