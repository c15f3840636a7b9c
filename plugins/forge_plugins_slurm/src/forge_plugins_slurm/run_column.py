"""The column of ``forge runs`` about Slurm jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_plugins_slurm.config import JobColumnConfig
from forge_plugins_slurm.job_record import last_job
from forge_plugins_slurm.queue import QueuedJob, queued_jobs

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING")


class JobColumn:
    """A ``RunColumn`` of forge-plugins-monitor: the newest job of each run, and why it waits or where it runs."""

    title = "JOB"

    def __init__(self, config: JobColumnConfig, /) -> None: ...

    def job_file(self, run: Path) -> Path | None:
        return run / "slurm" / "job.toml" if last_job(run) is not None else None

    def cells(self, runs: Sequence[Path]) -> Mapping[Path, Mapping[str, Any]]:
        jobs = {run: job for run in runs if (job := last_job(run)) is not None}
        queue = queued_jobs([job.job_id for job in jobs.values()])
        if queue is None:
            raise ForgeError("Slurm does not answer, so that what is queued is not known")
        return {run: _cell(job.job_id, queue.get(job.job_id)) for run, job in jobs.items()}


def _cell(job_id: str, queued: QueuedJob | None) -> dict[str, Any]:
    if queued is None:
        return {"text": job_id, "job_id": job_id}
    state = "queued" if queued.state in _WAITING else "running"
    text = f"{job_id} {queued.reason}".rstrip()
    return {"text": text, "state": state, "job_id": job_id, "reason": queued.reason}
