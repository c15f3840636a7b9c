"""``forge run``: train."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from forge_core.commands.validate import options_of
from forge_core.config.job import dump_job, load_job
from forge_core.engine.rendezvous import world_size_of
from forge_core.errors import ExitCode, ForgeError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--nproc", default="1", metavar="N|auto", help="Processes on this machine; auto is one a GPU.")
@click.option("--dry-run", is_flag=True, help="Build everything, stop before the first step, write nothing.")
@click.pass_obj
def run(obj: Any, config: Path, overrides: tuple[str, ...], nproc: str, dry_run: bool) -> None:
    """Train the job in CONFIG, or go on with it: a run that was interrupted continues from its last checkpoint.

    OVERRIDES are --section.key=value, section.key=value or --section.key value.

    Exit codes: 0 reached its end, 1 unexpected, 2 invalid configuration, data or plugin, 3 stopped early with a
    checkpoint saved, 4 non-finite loss or gradient, 5 lost another rank.
    """
    ranks = world_size_of(os.environ)
    if ranks is not None:  # one rank of a group that torchrun, Slurm or `--nproc` has started
        _end(_run_here(obj, config, overrides, ranks, dry_run))
    from forge_core.launch import launch, processes_asked_for

    world_size = processes_asked_for(nproc)
    if world_size == 1:
        _end(_run_here(obj, config, overrides, 1, dry_run))
    job = load_job(config, overrides, catalog=obj.catalog, world_size=world_size, options=options_of(run))
    os.environ["FORGE_DISABLE_PLUGINS"] = ",".join([*obj.disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")])
    options = [*(["--dry-run"] if dry_run else []), *(["--debug"] if obj.debug else [])]
    _end(launch(dump_job(job), world_size, options))


def _run_here(obj: Any, config: Path, overrides: tuple[str, ...], world_size: int, dry_run: bool) -> ExitCode:
    from forge_core.engine.run import run_job
    from forge_core.launch import leave_outcome

    # torch 2.13 announces new names for collectives that its own FSDP and DTensor still call by the old ones
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    code = ExitCode.UNEXPECTED
    try:
        job = load_job(config, overrides, catalog=obj.catalog, world_size=world_size, options=options_of(run))
        code = run_job(job, obj.catalog(job.plugins.disable), dry_run=dry_run)
    except ForgeError as error:
        code = error.exit_code
        raise
    finally:
        leave_outcome(code)
    return code


def _end(code: ExitCode) -> None:
    if code is not ExitCode.COMPLETED:
        sys.exit(int(code))
    click.get_current_context().exit(0)
