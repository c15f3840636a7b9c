"""Back into the queue: what a run does between its last checkpoint and its end, when Slurm wants the nodes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping

import torch.distributed as dist

from forge_core.contracts.callback import PREEMPTIONS, Callback, RunContext
from forge_plugins_slurm.config import ASKED, SlurmRequeueConfig

_ATTEMPTS = 3


class SlurmRequeue(Callback):
    """Requeues the job once the run is stopped and saved.

    Slurm's own ``--requeue`` is not enough: a job that saves and leaves within the grace time of its preemption counts
    as completed or failed, and is never started again; nor is one that reaches its time limit.
    """

    def __init__(self, config: SlurmRequeueConfig) -> None:
        self._environment: Mapping[str, str] = os.environ

    def run_start(self, run: RunContext) -> None:
        if "SLURM_JOB_ID" not in self._environment:
            run.log("slurm_requeue: this is not a Slurm job; it is not started again if it is stopped")

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        if not stopped or "SLURM_JOB_ID" not in self._environment:
            return
        if run.rank == 0:
            if stopped in PREEMPTIONS:
                self._requeue(run)
            else:
                run.log(f"stopped by {stopped}: not requeued")
        # srun may end the others as soon as one rank has left: none goes before the job is requeued.
        dist.barrier()

    def _requeue(self, run: RunContext) -> None:
        job = job_id(self._environment)
        asked = run.run_dir / ASKED
        for attempt in range(_ATTEMPTS):
            why_not, answer = _why_not(job), ""
            if why_not is not None:
                run.log(f"job {job} is not requeued by the run: {why_not}")
                return
            asked.parent.mkdir(exist_ok=True)
            asked.touch()
            answer = _answer("requeue", job)
            if answer == "" or "pending" in answer:  # Slurm has requeued it already, where preemption has no grace
                run.log(f"job {job} is requeued and will go on from here")
                return
            if answer == _MISSING:  # inside of a container
                break
            time.sleep(2**attempt)
        run.log(f"job {job} could not be requeued from here ({answer}); the batch script will try")


def job_id(environment: Mapping[str, str]) -> str:
    """The job as ``scontrol`` wants it: a task of an array by the array's id and its own number."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


_MISSING = "there is no scontrol"


def _why_not(job: str) -> str | None:
    """Slurm would requeue a cancelled job, too, if it is asked to while the job saves: it could not be cancelled."""
    found = dict(re.findall(r"(JobState|Reason)=(\S+)", _shown(job)))
    state, reason = found.get("JobState", "RUNNING"), found.get("Reason", "")
    if state in ("RUNNING", "PENDING", "REQUEUED", "PREEMPTED", "TIMEOUT") or reason == "TimeLimit":
        return None
    return f"Slurm is ending it ({state}); after a preemption Slurm starts it again, and not if it was cancelled"


def _shown(job: str) -> str:
    try:
        done = subprocess.run(["scontrol", "show", "job", job, "-o"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _answer(*command: str) -> str:
    """What ``scontrol`` has to say; nothing if it did what it was told."""
    try:
        done = subprocess.run(["scontrol", *command], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return _MISSING
    except subprocess.TimeoutExpired:
        return "the controller does not answer"
    if done.returncode < 0:  # ended like all processes of the job, because Slurm has begun to requeue it
        return ""
    return "" if done.returncode == 0 else (done.stderr + done.stdout).strip() or f"exit code {done.returncode}"
