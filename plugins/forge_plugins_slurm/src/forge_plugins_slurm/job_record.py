"""Which Slurm jobs a run has had: ``slurm/jobs.jsonl`` in its directory, a line a submission."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from forge_core.run.line_file import LineFile


@attrs.frozen(kw_only=True)
class JobRecord:
    """One submission of a run."""

    job_id: str
    """As Slurm writes it; ``"12_3"`` for the task 3 of the array 12. Requeueing does not change it."""
    submitted: float
    """Seconds since 1970."""
    log: str
    """What the job prints."""


def record_job(run: Path, job: JobRecord) -> None:
    """Add a line."""
    file = LineFile(run / "slurm" / "jobs.jsonl")
    file.append(json.dumps(attrs.asdict(job)))
    file.close()


def last_job(run: Path) -> JobRecord | None:
    """The newest submission; ``None`` for a run that has never been submitted."""
    try:
        lines = (run / "slurm" / "jobs.jsonl").read_text().splitlines()
        return JobRecord(**json.loads(lines[-1]))
    except (OSError, ValueError, IndexError, TypeError):
        return None
