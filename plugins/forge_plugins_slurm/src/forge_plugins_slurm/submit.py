"""``forge submit``: write a Slurm script that survives preemption, and submit it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time as clock
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job, lead_problem, seconds_of
from forge_core.contracts.command import options_of
from forge_core.contracts.data_source import DataSourceConfig
from forge_core.errors import ConfigError, ForgeError
from forge_core.job import ConfigProblems, Problem, catalog_of, dump_job, key_path, summary
from forge_plugins_slurm.cluster import FILE, VARIABLE, Cluster, find_cluster_file, read_cluster, with_options
from forge_plugins_slurm.job_record import JobRecord, last_job, record_job
from forge_plugins_slurm.queue import queued_jobs
from forge_plugins_slurm.script import Submission, batch_script
from forge_plugins_studies.study import load_study

if TYPE_CHECKING:
    from forge_core.contracts.command import Invocation
    from forge_core.registry.catalog import Catalog

REQUEUE = "forge-plugins-slurm:slurm_requeue"


@attrs.frozen(kw_only=True)
class SubmittedRun:
    """A run of a job, or of a task of a job array."""

    path: Path
    """Its directory."""
    job_id: str
    """Slurm's number, as in ``1234``; of a task, as in ``1234_0``."""
    log: str


@attrs.frozen(kw_only=True)
class Submitted:
    """A job that Slurm has taken."""

    job_id: str
    runs: Sequence[SubmittedRun]
    script: Path


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of nodes.")
@click.option("--spare-nodes", type=click.IntRange(min=0), metavar="N", help="More nodes, to replace lost ones.")
@click.option("--time", metavar="TIME", help="Limit of one start of the job, as Slurm writes it: 12:00:00, 2-00:00:00.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="GPUs of each node; one rank a GPU.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), metavar="N", help="For nodes without GPUs.")
@click.option("--partition", help="Where to submit.")
@click.option("--account", help="Whom the time is charged to.")
@click.option("--launcher", type=click.Choice(["srun", "torchrun"]), help="What starts the ranks.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=V,V",
    help="A run for each value, as one job array. Repeated, a run for each combination.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the script; write and submit nothing.")
@json_option(Submitted)
@click.pass_obj
def submit(
    obj: Invocation,
    config: Path,
    overrides: tuple[str, ...],
    nodes: int,
    spare_nodes: int | None,
    time: str | None,
    gpus_per_node: int | None,
    ranks_per_node: int | None,
    partition: str | None,
    account: str | None,
    launcher: Literal["srun", "torchrun"] | None,
    sweeps: tuple[str, ...],
    only_print: bool,
    as_json: bool,
) -> None:
    """Check the job in CONFIG for the nodes that it will run on, write a Slurm script, and submit it.

    OVERRIDES are --section.key=value, section.key=value or --section.key value. What is true of the cluster stands in
    cluster.toml next to CONFIG, or in the file that FORGE_CLUSTER names; options go before it.
    """
    if only_print and as_json:
        raise ConfigError("--json: has no effect with --print, which submits nothing")
    cluster_file = find_cluster_file(config)
    cluster = with_options(
        read_cluster(cluster_file),
        spare_nodes=spare_nodes,
        time=time,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        partition=partition,
        account=account,
        launcher=launcher,
    )
    limit = _time_limit(cluster, cluster_file)
    world_size = nodes * cluster.ranks_on_each_node
    study = load_study(
        config, overrides, sweeps, catalog=obj.catalog, world_size=world_size, options=options_of(submit)
    )
    jobs = [_requeued(_stopping_in_time(job, cluster, limit), catalog_of(job, obj.catalog)) for job in study.jobs]
    for note in dict.fromkeys(one for job in jobs for one in (*_missing_data(job), *_unnamed_interface(cluster))):
        click.echo(f"note: {note}", err=True)
    submission = Submission(
        name=study.name,
        runs=study.runs,
        is_array=bool(sweeps),
        folder=study.folder if sweeps else study.runs[0] / "slurm",
        working_directory=Path.cwd(),
        nodes=nodes,
        time=limit,
        cluster=cluster,
        python=cluster.python or sys.executable,
        disabled_plugins=obj.disabled,
        trusted_files=os.environ.get("FORGE_TRUST_FILES", "") if any(job.plugins.texts for job in jobs) else "",
    )
    script = batch_script(submission)
    if only_print:
        click.echo(script, nl=False)
        return
    _refuse_if_queued(submission.runs)
    _write(submission, script, jobs)
    job = _sbatch(submission.script)
    runs = [_recorded(submission, job, task) for task in range(len(submission.runs))]
    if as_json:
        print_json(Submitted(job_id=job, runs=runs, script=submission.script))
        return
    what = f"{len(jobs)} runs" if submission.is_array else summary(jobs[0], world_size)
    click.echo(f"submitted job {job}: {what}")
    click.echo(f"script {submission.script}\nlog    {submission.log}")


def _recorded(submission: Submission, job: str, task: int) -> SubmittedRun:
    """A run of the job, which is noted in its directory."""
    task_id = f"{job}_{task}" if submission.is_array else job
    log = str(submission.log)
    if submission.is_array:
        log = str(submission.folder / f"{task_id}.log")
    record_job(submission.runs[task], JobRecord(job_id=task_id, submitted=clock.time(), log=log))
    return SubmittedRun(path=submission.runs[task], job_id=task_id, log=log)


def _missing_data(job: Job) -> Iterator[str]:
    """What this machine, from which the job is submitted, does not have of the job's data."""
    for section, use in (("data", job.data), ("eval.data", job.eval.data)):
        if use is not None and isinstance(use.config, DataSourceConfig):
            yield from (f"{section}: {sentence} The nodes of the job must see it." for sentence in use.config.missing())


def _unnamed_interface(cluster: Cluster) -> Iterator[str]:
    """Ranks use gloo beside NCCL, and each has a variable of its own."""
    nccl, gloo = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
    if nccl in cluster.environment and not (gloo in cluster.environment or gloo in os.environ or cluster.setup):
        value = cluster.environment[nccl]
        yield f"{FILE} sets {nccl} = {value!r} and not {gloo}: without it gloo may take another network, and hang"


def _time_limit(cluster: Cluster, file: Path | None) -> str:
    if cluster.time is None:
        raise ConfigError(
            f"--time is missing: the time limit of one start of the job, as in --time 12:00:00; or set time in "
            f"{file or f'{FILE}, next to the configuration or where {VARIABLE} says'}"
        )
    seconds = seconds_of(cluster.time)
    if cluster.signal_lead >= seconds:
        raise ConfigError(
            f"signal_lead = {cluster.signal_lead} s is not below the time limit of {cluster.time} = {seconds} s: the "
            f"run would be told to save and leave as soon as it starts; raise --time, or lower signal_lead in "
            f"{file or FILE}"
        )
    return cluster.time


def _requeued(job: Job, catalog: Catalog) -> Job:
    """With the callback that requeues."""
    if REQUEUE in [callback.qualified_name for callback in job.callbacks]:
        return job
    requeue = ComponentBuilder(catalog).resolve("callback", REQUEUE)
    return attrs.evolve(job, callbacks=(*job.callbacks, requeue))


def _stopping_in_time(job: Job, cluster: Cluster, limit: str) -> Job:
    """By the run's own clock as well: Slurm looks every 30 seconds only, and wrappers and containers lose signals.

    Raises:
        ConfigError: the run would stop as soon as it starts, or says of itself that it may not stop in time.
    """
    run, signal_lead = job.run, float(cluster.signal_lead)
    lead = signal_lead if run.stop_before_end is None else run.stop_before_end
    for what, one in (("the time limit of the job", limit), ("run.time_limit", run.time_limit)):
        problem = lead_problem(lead, one, what) if one is not None else None
        if problem:
            raise ConfigError(f"run.stop_before_end: {problem}")
    # an older Slurm does not tell the run its end: then there is only the signal
    if said := [*job.too_long_to_stop(signal_lead, "signal_lead", "the time limit of the job")]:
        raise ConfigProblems(Problem(key_path(key), sentence) for key, sentence in said)
    return attrs.evolve(job, run=attrs.evolve(run, stop_before_end=lead))


def _refuse_if_queued(runs: Sequence[Path]) -> None:
    """A job that waits reads its ``job.toml`` when it starts: a second one must not write over it.

    Raises:
        ConfigError: a job of one of these runs waits or runs.
        ForgeError: Slurm does not say whether.
    """
    last = {run: job for run in runs if (job := last_job(run)) is not None}
    queued = queued_jobs([job.job_id for job in last.values()])
    if queued is None and shutil.which("squeue") is not None:
        run, job = next(iter(last.items()))
        raise ForgeError(
            f"squeue does not answer, so that it is not known whether job {job.job_id} of {run} still waits or runs; "
            "try again later"
        )
    for run, job in last.items():
        if queued and job.job_id in queued:
            raise ConfigError(
                f"{run} has job {job.job_id} already, which is {queued[job.job_id].state.lower()}; "
                f"scancel {job.job_id}, or choose another run.name"
            )


def _write(submission: Submission, script: str, jobs: Sequence[Job]) -> None:
    try:
        for run, job in zip(submission.runs, jobs, strict=True):
            (run / "slurm").mkdir(parents=True, exist_ok=True)
            (run / "slurm" / "job.toml").write_text(dump_job(job))
            (run / "slurm" / "failures").unlink(missing_ok=True)  # whoever submits again has mended something
        submission.folder.mkdir(parents=True, exist_ok=True)
        submission.script.write_text(script)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {error.filename}: {error.strerror}") from error


def _sbatch(script: Path) -> str:
    """Returns the job's id."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"there is no sbatch on this machine, so nothing was submitted; on one with Slurm: sbatch {script}"
        )
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().removeprefix("sbatch: error: ")
        raise ForgeError(f"Slurm does not take the job: {said}\nThe script is {script}")
    return done.stdout.strip().partition(";")[0]  # of a federation, the cluster's name follows
