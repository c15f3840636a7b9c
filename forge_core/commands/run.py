"""``forge run``: train."""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from forge_core.contracts.cluster_environment import ClusterEnvironment
from forge_core.contracts.command import options_of
from forge_core.errors import INTERRUPTED, ConfigError, ExitCode, ForgeError, NotJoinedError, exit_code_of, place_of
from forge_core.run.process import frozen_imports

COMMAND = "FORGE_COMMAND"
"""Environment variable that tells the ranks of ``--nproc`` what was typed."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Build everything, stop before the first step, write nothing.")
@click.option("--resume", metavar="auto|never|STEP|PATH", help="Short for --checkpoint.resume: where to start from.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="When a process crashes, start all of this machine again: N times in a row without a new checkpoint.",
)
@click.pass_obj
def run(
    obj: Any, config: Path, overrides: tuple[str, ...], dry_run: bool, resume: str | None, max_restarts: int
) -> None:
    """Train the job in CONFIG, or go on with it: a run that was interrupted continues from its last checkpoint.

    OVERRIDES are --section.key=value, section.key=value or --section.key value; ~section.key takes a key back.

    Exit codes: 0 reached its end, 1 unexpected, 2 invalid configuration, data or plugin, 3 stopped early with a
    checkpoint saved, 4 non-finite loss or gradient, 5 lost another rank.
    """
    from forge_core.distributed.cluster import find_cluster, note_job  # here, as completion needs the options alone
    from forge_core.distributed.environment import launched_ranks
    from forge_core.distributed.torchrun import refuse_split_brain
    from forge_core.job import disabled_plugins, dump_job, load_job
    from forge_core.run.directory import RunDirectory
    from forge_core.run.output import LossyOutput

    obj.until_the_end.enter_context(LossyOutput())
    if resume is not None:
        overrides = (*overrides, f"checkpoint.resume={json.dumps(resume, ensure_ascii=False)}")
    cluster = find_cluster(obj.catalog(disabled_plugins(config, overrides, options_of(run))), os.environ)
    note_job(cluster, os.environ)
    ranks = launched_ranks(os.environ, cluster, obj.nproc)
    if ranks is not None:  # one rank of a group that torchrun, a cluster or `--nproc` has started
        refuse_split_brain(os.environ, cluster=cluster)
        if max_restarts:
            raise ConfigError("--max-restarts belongs to --nproc; here, torchrun or a cluster starts the ranks: ask it")
        _end(_run_here(obj, cluster, config, overrides, ranks, dry_run))
    if obj.nproc.isdecimal():  # what is wrong with the job is said before torch is imported, which takes seconds
        load_job(config, overrides, catalog=obj.catalog, world_size=int(obj.nproc) or None, options=options_of(run))
    with frozen_imports():
        from forge_core.launch import Ranks, launch, processes_asked_for

    world_size = processes_asked_for(obj.nproc)
    if world_size == 1 and max_restarts == 0:
        _end(_run_here(obj, cluster, config, overrides, 1, dry_run))
    job = load_job(config, overrides, catalog=obj.catalog, world_size=world_size, options=options_of(run))
    os.environ["FORGE_DISABLE_PLUGINS"] = ",".join([*obj.disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")])
    options = [*(["--dry-run"] if dry_run else []), *(["--debug"] if obj.debug else [])]
    checkpoints = RunDirectory(job, writes=False).checkpoints
    asked = Ranks(world_size, dump_job(job), options, {COMMAND: _command(obj)})
    _end(launch(asked, max_restarts=max_restarts, checkpoints=checkpoints, until_the_end=obj.until_the_end))


def _run_here(
    obj: Any, cluster: ClusterEnvironment, config: Path, overrides: tuple[str, ...], world_size: int, dry_run: bool
) -> int:
    with frozen_imports():
        import torch._dynamo  # noqa: F401 - torch's optimizers import it, if they are the first to do so

        from forge_core.distributed.mesh import choose_device
        from forge_core.job import ConfigProblems, catalog_of, load_job, placed
        from forge_core.launch import leave_outcome
        from forge_core.run.process import keep_freed_memory
        from forge_core.run.run import run_job
        from forge_core.run.signals import stacks_on_quit

    # torch 2.13 announces new names for collectives that its own FSDP and DTensor still call by the old ones
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    code: int = ExitCode.UNEXPECTED
    try:
        job = load_job(config, overrides, catalog=obj.catalog, world_size=world_size, options=options_of(run))
        if choose_device(job.run.device).type == "cpu":
            keep_freed_memory()
        catalog, command = catalog_of(job, obj.catalog), _command(obj)
        with stacks_on_quit():
            code = run_job(job, catalog, dry_run=dry_run, until_the_end=obj.until_the_end, command=command)
    except SystemExit as error:
        if error.code == INTERRUPTED:
            raise
        why = f"the process was told to exit ({error.code}) before the run had ended: {place_of(error)}"
        raise ForgeError(why) from error
    except Exception as error:
        code = exit_code_of(error)
        if isinstance(error, NotJoinedError) and (sentence := cluster.explain(error)):
            error.add_note(sentence)
        if isinstance(error, ConfigProblems) and COMMAND not in os.environ:  # else it is a copy that a launcher made
            raise placed(error, config, overrides) from error
        raise
    finally:
        leave_outcome(code)
    return code


def _command(obj: Any) -> str:
    """The command line, here or of the launcher that has started this rank."""
    return os.environ.get(COMMAND) or shlex.join(["forge", *obj.arguments])


def _end(code: int) -> None:
    if code != ExitCode.COMPLETED:
        sys.exit(int(code))
    click.get_current_context().exit(0)
