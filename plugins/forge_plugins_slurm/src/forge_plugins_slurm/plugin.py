"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Check, Command, Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """The trainer's part of coming back after preemption."""
    yield Component(
        name="slurm_requeue",
        summary="puts the Slurm job back into the queue when a signal has stopped the run and it is saved",
        factory="forge_plugins_slurm.requeue:SlurmRequeue",
        config="forge_plugins_slurm.config:SlurmRequeueConfig",
    )


@hookimpl
def forge_checks() -> Iterable[Check]:
    """What the cluster's settings mean for a run."""
    yield Check(
        name="slurm",
        summary="preemption, grace, what follows a requeue",
        run="forge_plugins_slurm.slurm_settings:look",
        writes="forge_plugins_slurm.slurm_settings:cluster_file",
    )


@hookimpl
def forge_cluster_environments() -> Iterable[Component]:
    """Slurm's variables, read for the core."""
    yield Component(
        name="slurm",
        summary="ranks from srun's tasks, the job's number and end",
        factory="forge_plugins_slurm.cluster_environment:SlurmEnvironment",
        config="forge_plugins_slurm.config:SlurmEnvironmentConfig",
    )


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge submit``."""
    yield Command(
        name="submit",
        summary="write a Slurm script that survives preemption, and submit it",
        run="forge_plugins_slurm.submit:submit",
    )


@hookimpl(optionalhook=True)
def forge_run_columns() -> Iterable[Component]:
    """What ``forge runs`` says of Slurm, where forge-plugins-monitor is installed."""
    yield Component(
        name="slurm",
        summary="the job of each run: why it waits, or where it runs",
        factory="forge_plugins_slurm.run_column:JobColumn",
        config="forge_plugins_slurm.config:JobColumnConfig",
    )
