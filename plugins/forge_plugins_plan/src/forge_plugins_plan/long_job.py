"""A long job, and what its failures, restarts and saves take."""

from __future__ import annotations

import math

import attrs

from forge_plugins_plan.figures import Figures

DAY = 86_400.0
_GB = 1e9


@attrs.frozen(kw_only=True)
class LongJob:
    """What is known of the job itself."""

    gpus: int
    """Of all replicas."""
    checkpoint_bytes: float
    """One checkpoint: parameters and optimizer state of the whole model."""
    copies: float = 1.0
    """How many times the ranks hold, and read, what a checkpoint has: ``dp_replicate`` times replicas."""
    step_seconds: float
    interval: float
    """Seconds of training from checkpoint to checkpoint; infinite where only the last step is saved."""
    background: bool = True
    step_timeout: float = 600.0
    has_mirror: bool = False
    memory_interval: float = math.inf
    """Seconds of training from checkpoint to checkpoint in the memory of the nodes; infinite where there are none."""


@attrs.frozen(kw_only=True)
class Costs:
    """Seconds that follow from a job and figures."""

    blocked: float
    """Training waits for a save."""
    written: float
    """From then until the checkpoint is there, in the background."""
    lost_beside: float
    """Of training, while it is written."""
    copied: float
    """From then until it is at the mirror."""
    fetched: float
    """To have it back from there."""
    start: float
    """Processes and groups."""
    read: float
    """A checkpoint, by all ranks."""
    wait: float
    """For a node that no spare replaces, beyond the start."""
    given: float
    """A replica is given the state of another, through the host's memory."""
    memory_blocked: float
    """Training waits for a checkpoint in memory: a rank copies what no other one writes."""
    memory_written: float
    """From then until it is there, and a copy on the next node."""
    memory_read: float
    """Such a checkpoint, by all ranks; what other nodes have is sent."""
    spare_away: float
    """Until a spare node that was used is replaced."""

    @property
    def of_save(self) -> float:
        """Training time that a save costs."""
        return self.blocked + self.lost_beside


def costs_of(job: LongJob, figures: Figures) -> Costs:
    """What each thing takes, as a function of the number of GPUs and of the bytes of a checkpoint."""
    of_replica = job.gpus / figures.replicas
    storage = job.gpus * figures.storage_gb_per_gpu * _GB
    mirror = job.gpus * figures.mirror_gb_per_gpu * _GB
    copied_to_host = job.checkpoint_bytes * job.copies / job.gpus / (figures.host_copy_gb * _GB)
    of_rank = job.checkpoint_bytes / job.gpus
    to_disk = job.checkpoint_bytes / storage
    start = figures.start_seconds + figures.groups_seconds_per_1000_gpus * of_replica / 1000
    doublings = max(0.0, math.log2(of_replica / 2048))
    requeue = max(start, figures.requeue_seconds + figures.requeue_seconds_per_doubling * doublings)
    return Costs(
        blocked=copied_to_host if job.background else copied_to_host + to_disk,
        written=to_disk if job.background else 0.0,
        lost_beside=figures.slower_while_written * to_disk if job.background else 0.0,
        copied=job.checkpoint_bytes / mirror,
        fetched=job.checkpoint_bytes / mirror,
        start=start,
        read=job.checkpoint_bytes * job.copies / storage,
        wait=requeue - start,
        given=copied_to_host,
        memory_blocked=copied_to_host / job.copies,
        memory_written=of_rank / (figures.memory_write_gb * _GB),
        memory_read=of_rank * job.copies / (figures.memory_read_gb * _GB)
        + of_rank * (job.copies - 1) / (figures.memory_send_gb * _GB),
        spare_away=requeue * figures.replenish_of_requeue,
    )


def failures_per_day(job: LongJob, figures: Figures) -> float:
    """Mean number of them, without planned stops."""
    return figures.failures_per_1000_gpus_day * job.gpus / 1000 + figures.lost_file_systems_per_day


def seconds_between_failures(job: LongJob, figures: Figures) -> float:
    """Mean time between failures, without planned stops; infinite if there are none."""
    a_day = failures_per_day(job, figures)
    return DAY / a_day if a_day else math.inf


def best_interval(job: LongJob, figures: Figures) -> float:
    """Seconds of training between checkpoints that lose least.

    That is sqrt(2 C M) for a save that costs C, and M seconds between failures (Young 1974, Daly 2006), but no less
    than a step, nor than a checkpoint takes to be written.
    """
    costs = costs_of(job, figures)
    young = math.sqrt(2 * costs.of_save * seconds_between_failures(job, figures)) if costs.of_save else 0.0
    return max(young, job.step_seconds, costs.written)


def best_memory_interval(job: LongJob, figures: Figures) -> float:
    """The same between checkpoints in the memory of the nodes."""
    costs = costs_of(job, figures)
    young = (
        math.sqrt(2 * costs.memory_blocked * seconds_between_failures(job, figures)) if costs.memory_blocked else 0.0
    )
    return max(young, job.step_seconds, costs.memory_blocked + costs.memory_written)
