"""``forge checkpoint fetch``: a checkpoint from a mirror, to where other commands read it."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from forge_core.checkpoint.fsync import flush
from forge_core.checkpoint.manifest import DamagedError, Manifest, as_size, read_manifest
from forge_core.commands.json_output import json_option, print_json
from forge_core.config.describe import printable
from forge_core.contracts.checkpoint_mirror import CheckpointMirror
from forge_core.contracts.command import Invocation
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog
from forge_plugins_monitor.named_run import JOB, NamedRun, is_url, mirror_at

if TYPE_CHECKING:
    from forge_core.checkpoint.store import CheckpointStore


@attrs.frozen(kw_only=True)
class Fetched:
    """A checkpoint of the mirror that is here now."""

    step: int
    path: Path
    """Its folder."""
    bytes: int
    was_here: bool
    """It was here before, and whole; nothing was fetched."""


@click.command()
@click.argument("path")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="The one of step N, not the newest whole one.")
@click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="A directory for it, not the run's own.")
@json_option(Fetched)
@click.pass_obj
def fetch(obj: Invocation, path: str, step: int | None, to: Path | None, as_json: bool) -> None:
    """Fetch a checkpoint of the run in PATH from its checkpoint.mirror, or of the run in a mirror's URL.

    It is verified, and `forge generate` can read it, for example. Nothing is fetched while the run trains. The start of
    a run needs no fetch: it asks the mirror itself.
    """
    from forge_core.run.lease import Lease

    mirror, own = _source(path, obj.catalog())
    if (run := to or own) is None:
        raise ConfigError(f"{path} is the mirror of a run; give --to DIR, a directory for its checkpoint")
    wanted = _to_fetch(mirror, step)
    try:
        lease = Lease(run, lambda line: click.echo(line, err=True))  # no trainer can start, and none is running
        try:
            if to is not None:
                _take_job(to, mirror)
            fetched = _fetch(mirror, wanted, run)
        finally:
            lease.give_back()
    except OSError as error:
        raise ConfigError(f"cannot write to {run}: {error.strerror}") from error
    if as_json:
        print_json(fetched)
    else:
        how = "was here, and whole" if fetched.was_here else f"fetched, {as_size(fetched.bytes)}"
        click.echo(printable(f"{fetched.path}: {how}"))


def _source(path: str, catalog: Catalog) -> tuple[CheckpointMirror, Path | None]:
    """The mirror to fetch from, and the directory of its run, unless ``path`` is the mirror itself."""
    run = None if is_url(path) else NamedRun(Path(path), may_be_elsewhere=True)
    if run is None or run.is_mirror:
        return mirror_at(path, catalog), None
    if not run.has_mirror:
        raise ConfigError(f"{run.path / JOB} has no checkpoint.mirror, from which one could be fetched")
    return run.mirror(catalog), run.path


def _to_fetch(mirror: CheckpointMirror, step: int | None) -> dict[int, Manifest | DamagedError]:
    """Checkpoints of the mirror to try, one after the other."""
    there = mirror.available()
    if not there:
        raise ConfigError(f"{mirror.place} has no checkpoints")
    if step is None:
        return dict(sorted(there.items(), reverse=True))
    if step not in there:
        steps = ", ".join(map(str, there))
        raise ConfigError(f"--step: {mirror.place} has no checkpoint of step {step}; there are {steps}")
    return {step: there[step]}


def _take_job(run: Path, mirror: CheckpointMirror) -> None:
    """A directory without a job gets that of the run's last start.

    Raises:
        ConfigError: it has another job.
    """
    job, path = mirror.last_job(), run / JOB
    if job is not None and not path.exists():
        path.write_text(job)
    elif job is not None and path.read_text() != job:
        raise ConfigError(f"{path} is not the job that {mirror.place} has; give another directory, --to DIR")


def _fetch(mirror: CheckpointMirror, wanted: Mapping[int, Manifest | DamagedError], run: Path) -> Fetched:
    """Bring the first of them here that is whole."""
    from forge_core.checkpoint.store import CheckpointStore, whole_problem

    store = CheckpointStore(run / "checkpoints")
    for step, there in wanted.items():
        folder = store.folder(step)
        was_here = folder.exists() and whole_problem(folder) is None
        if was_here and read_manifest(folder) != there:
            raise ConfigError(f"{folder} is whole, and not what {mirror.place} has; give another directory, --to DIR")
        damage = None if was_here else _fetch_one(mirror, step, store)
        if damage is None:
            return Fetched(step=step, path=folder, bytes=read_manifest(folder).n_bytes, was_here=was_here)
        click.echo(printable(f"warning: {mirror.place}: step {step}: {damage}"), err=True)
    raise ConfigError(f"nothing was fetched: what {mirror.place} has is damaged")


def _fetch_one(mirror: CheckpointMirror, step: int, store: CheckpointStore) -> str | None:
    """Fetch a checkpoint, and commit it. Returns its damage at the mirror, or ``None``."""
    unfinished, final = store.unfinished_folder(step, uuid.uuid4().hex[:12]), store.folder(step)
    try:
        damage = mirror.fetch(step, unfinished)
        if damage is None and (final.exists() or step > max(store.steps(), default=-1)):
            store.commit(unfinished, step)
        elif damage is None:  # an older one, which `latest` is not to name
            unfinished.rename(final)
            flush(store.path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return damage
