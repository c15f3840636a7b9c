"""``forge checkpoint``: which checkpoints a run has, what is in them, whether they are whole; and removing some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.checkpoint.manifest import DamagedError, Manifest, as_size, read_manifest, visible_damage
from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import aligned, wrapped
from forge_core.config.describe import printable
from forge_core.config.diff import Difference, differences
from forge_core.config.sections import CheckpointSection, mesh_words
from forge_core.contracts.checkpoint_mirror import CheckpointMirror
from forge_core.contracts.command import Invocation
from forge_core.errors import ConfigError, ExitCode, MirrorError
from forge_plugins_monitor.checkpoint_fetch import fetch
from forge_plugins_monitor.named_run import JOB, NamedRun, is_checkpoint, is_url, mirror_at

if TYPE_CHECKING:
    from forge_core.checkpoint.store import CheckpointStore

_PATH = click.argument("path", type=click.Path(path_type=Path))
_PATH_OR_URL = click.argument("path")


@attrs.frozen(kw_only=True)
class ListedCheckpoint:
    """A checkpoint of a run."""

    step: int
    path: str | None
    """Its folder; null if it is at the mirror alone."""
    written: str | None = None
    """When, in ISO 8601, with the zone. Null, as what follows, if it is damaged."""
    bytes: int | None = None
    tokens: int | None = None
    """That were trained on before it."""
    mesh: Mapping[str, int] | None = None
    """Degrees of the axes that it was written with."""
    metrics: Mapping[str, float] | None = None
    """The last evaluation's values."""
    damage: str | None = None
    """What is wrong with it; null if it is whole, as far as the names and sizes of its files tell."""
    kept_by: Sequence[str] | None = None
    """Keys of ``[checkpoint]`` by which it is kept; without one, ``forge checkpoint prune`` removes it. Null if it is
    not here."""
    mirror: str | None = None
    """``whole``, or what is wrong with it at the mirror; null if it is not there, or there is no mirror."""


@attrs.frozen(kw_only=True)
class Tensors:
    """The tensors of one part of a checkpoint, such as the optimizer's."""

    tensors: int
    """Their number."""
    bytes: int


@attrs.frozen(kw_only=True)
class Versions:
    """The version of a distribution."""

    then: str
    """When the checkpoint was written."""
    now: str | None
    """Null if it is not installed."""


@attrs.frozen(kw_only=True)
class ShownCheckpoint:
    """What is in a checkpoint."""

    path: Path
    step: int
    tokens: int
    """That were trained on before it."""
    written: str
    """When, in ISO 8601, with the zone."""
    bytes: int
    shared_bytes: int
    """Of them in files that other checkpoints have, too."""
    files: int
    """Their number."""
    mesh: Mapping[str, int]
    """Degrees of the axes that it was written with."""
    metrics: Mapping[str, float]
    """The last evaluation's values."""
    tensors: Mapping[str, Tensors]
    """By part: ``model``, ``optimizer``, …"""
    state: Mapping[str, int]
    """Versions of the state of callbacks and trackers, by namespace."""
    versions: Mapping[str, Versions]
    """By distribution."""
    changed_since: Sequence[Difference]
    """Keys in which the run's job differs now; none of a checkpoint without its run."""


@attrs.frozen
class Verified:
    """A checkpoint that was read."""

    name: str
    """Its folder, or the mirror and the step."""
    damage: str | None
    """What is wrong with it; null if it is whole."""


@attrs.frozen(kw_only=True)
class Pruned:
    """What was removed, or with ``--dry-run`` would be."""

    removed: Sequence[int]
    """Steps."""
    damaged: Mapping[str, str]
    """What is wrong with each damaged one, which was not touched; by folder."""
    checkpoints: int
    """How many there were."""
    bytes: int
    """That were freed; files that are shared with others count as well."""


@click.group()
def checkpoint() -> None:
    """Look at the checkpoints of a run, fetch one from its mirror, and remove the ones that are not needed."""


checkpoint.add_command(fetch)


@checkpoint.command("list")
@_PATH_OR_URL
@json_option(list[ListedCheckpoint])
@click.pass_obj
def list_checkpoints(obj: Invocation, path: str, as_json: bool) -> None:
    """List the checkpoints of the run in PATH, from the oldest, and those at its checkpoint.mirror; or of the run in a
    mirror's URL.

    A checkpoint is whole as far as the names and sizes of its files tell; `forge checkpoint verify` reads them.
    """
    here: dict[int, Manifest | str] = {}
    folders: dict[int, str] = {}
    if is_url(path):
        mirror: CheckpointMirror | None = mirror_at(path, obj.catalog())
        section = CheckpointSection()
    else:
        run = NamedRun(Path(path), may_be_elsewhere=True)
        mirror, section = _mirror_or_warning(run, obj), run.section
        for step in run.store.steps():
            here[step], folders[step] = _look(run.store.folder(step)), str(run.store.folder(step))
    there = _look_there(mirror, must_answer=is_url(path)) if mirror else {}
    reasons = _reasons_to_keep(here, section)
    rows = [
        _listed(step, here.get(step, there.get(step)), folders.get(step), reasons.get(step), there.get(step))
        for step in sorted({*here, *there})
    ]
    if as_json:
        print_json(rows)
    else:
        click.echo(printable(_table(rows, has_mirror=mirror is not None) if rows else f"{path} has no checkpoints"))


def _listed(
    step: int,
    one: Manifest | str | None,
    folder: str | None,
    reasons: Sequence[str] | None,
    there: Manifest | str | None,
) -> ListedCheckpoint:
    at_mirror = "whole" if isinstance(there, Manifest) else there
    if not isinstance(one, Manifest):
        return ListedCheckpoint(step=step, path=folder, damage=one, mirror=at_mirror)
    return ListedCheckpoint(
        step=step,
        path=folder,
        written=one.written,
        bytes=one.n_bytes,
        tokens=one.tokens,
        mesh=one.mesh,
        metrics=one.metrics,
        kept_by=reasons,
        mirror=at_mirror,
    )


def _reasons_to_keep(here: Mapping[int, Manifest | str], section: CheckpointSection) -> dict[int, list[str]]:
    from forge_core.checkpoint.store import reasons_to_keep

    return reasons_to_keep([(step, one.metrics) for step, one in here.items() if isinstance(one, Manifest)], section)


@checkpoint.command()
@_PATH
@json_option(ShownCheckpoint)
def show(path: Path, as_json: bool) -> None:
    """Show what is in the checkpoint in PATH, or in the newest whole one of the run in PATH."""
    from forge_core.checkpoint.store import find_checkpoint

    found = find_checkpoint(path, lambda line: click.echo(printable(line), err=True))
    manifest = found.manifest
    shown = ShownCheckpoint(
        path=found.path,
        step=found.step,
        tokens=manifest.tokens,
        written=manifest.written,
        bytes=manifest.n_bytes,
        shared_bytes=_shared_bytes(found.path, manifest),
        files=len(manifest.files),
        mesh=manifest.mesh,
        metrics=manifest.metrics,
        tensors=_tensors_by_namespace(found.saved_tensors()),
        state=_state_by_namespace(found.state()),
        versions={name: Versions(then=then, now=_installed(name)) for name, then in manifest.versions.items()},
        changed_since=_changed_since(found.path),
    )
    if as_json:
        print_json(shown)
    else:
        click.echo(printable("\n".join(map(wrapped, _described(shown)))))


@checkpoint.command()
@_PATH_OR_URL
@click.option("--mirror", "with_mirror", is_flag=True, help="Read those at the run's checkpoint.mirror, too.")
@json_option(list[Verified])
@click.pass_context
def verify(ctx: click.Context, path: str, with_mirror: bool, as_json: bool) -> None:
    """Read every bit of the checkpoint in PATH, or of all those of the run in PATH, or in a mirror's URL.

    Exit codes: 0 all are whole, 2 one is damaged; what is wrong with it names the file.
    """
    read = []
    for name, damage in _problems(path, with_mirror, ctx.obj):
        if not as_json:
            click.echo(printable(f"{name}: {damage or 'whole'}"))
        read.append(Verified(name, damage))
    if as_json:
        print_json(read)
    if not read:
        hint = "" if with_mirror or is_url(path) else NamedRun(Path(path)).hint
        raise ConfigError(f"{path} has no checkpoints{hint}")
    ctx.exit(ExitCode.INVALID if any(one.damage for one in read) else ExitCode.COMPLETED)


def _problems(path: str, with_mirror: bool, obj: Invocation) -> Iterator[tuple[str, str | None]]:
    from forge_core.checkpoint.store import whole_problem

    mirror: CheckpointMirror | None = None
    if is_url(path):
        mirror = mirror_at(path, obj.catalog())
    elif is_checkpoint(Path(path)):
        if with_mirror:
            raise ConfigError(f"--mirror: {path} is one checkpoint; give the directory of its run")
        yield str(Path(path).resolve()), whole_problem(Path(path).resolve())
    else:
        run = NamedRun(Path(path), may_be_elsewhere=with_mirror)
        if with_mirror and not run.has_mirror:
            raise ConfigError(f"--mirror: {run.path / 'job.toml'} has no checkpoint.mirror")
        mirror = run.mirror(obj.catalog()) if with_mirror else None
        for step in run.store.steps():
            yield str(run.store.folder(step)), whole_problem(run.store.folder(step))
    for step, found in mirror.available().items() if mirror else ():
        assert mirror is not None
        damage = str(found) if isinstance(found, DamagedError) else mirror.problem(step, reads=True)
        yield f"{mirror.place}: step {step}", damage


@checkpoint.command()
@_PATH
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Instead of the run's checkpoint.keep_last.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option(Pruned)
def prune(path: Path, keep_last: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove the checkpoints of the run in PATH that its [checkpoint] section does not keep.

    The newest one always stays, and damaged ones are not touched. Nothing is removed while the run trains.
    """
    run = NamedRun(path)
    if run.is_mirror:
        raise ConfigError(f"{path} is the mirror of a run, which prunes it as checkpoint.mirror_keep_last says")
    section = run.section if keep_last is None else attrs.evolve(run.section, keep_last=keep_last)
    if section.keep_last is None:
        raise ConfigError(f"{run.path / 'job.toml'} has no checkpoint.keep_last, so all are kept; give --keep-last N")
    if dry_run:
        pruned = _prune(run.store, section, dry_run=True)
    else:
        from forge_core.run.lease import Lease

        lease = Lease(run.path, lambda line: click.echo(line, err=as_json))  # no trainer can start, and none is running
        try:
            run.store.remove_unfinished()
            pruned = _prune(run.store, section, dry_run=False)
        finally:
            lease.give_back()
    if as_json:
        print_json(pruned)
        return
    for step in pruned.removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {run.store.folder(step).name}")
    for name, damage in pruned.damaged.items():
        click.echo(printable(f"left {name}, which is damaged: {damage}"))
    click.echo(f"{len(pruned.removed)} of {pruned.checkpoints} checkpoints, {as_size(pruned.bytes)}")


def _prune(store: CheckpointStore, section: CheckpointSection, *, dry_run: bool) -> Pruned:
    from forge_core.checkpoint.store import superfluous

    manifests = {step: _look(store.folder(step)) for step in store.steps()}
    whole = {step: one for step, one in manifests.items() if isinstance(one, Manifest)}
    steps = superfluous([(step, one.metrics) for step, one in whole.items()], section)
    if not dry_run:
        store.remove(steps)
    return Pruned(
        removed=steps,
        damaged={store.folder(step).name: one for step, one in manifests.items() if isinstance(one, str)},
        checkpoints=len(manifests),
        bytes=sum(whole[step].n_bytes for step in steps),
    )


def _mirror_or_warning(run: NamedRun, obj: Invocation) -> CheckpointMirror | None:
    """Without the mirror's package, what is here is shown all the same."""
    if not run.has_mirror:
        return None
    try:
        return run.mirror(obj.catalog())
    except ConfigError as error:
        click.echo(printable(f"warning: {error}"), err=True)
        return None


def _look(folder: Path) -> Manifest | str:
    """The manifest, or what is visibly wrong with the checkpoint."""
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        return str(error)
    return visible_damage(folder, manifest.files) or manifest


def _look_there(mirror: CheckpointMirror, *, must_answer: bool) -> dict[int, Manifest | str]:
    """Same as ``_look``, of all those at a mirror; without an answer, what is here is shown all the same."""
    try:
        return {
            step: str(found) if isinstance(found, DamagedError) else mirror.problem(step, reads=False) or found
            for step, found in mirror.available().items()
        }
    except MirrorError as error:
        if must_answer:
            raise
        click.echo(printable(f"warning: {error}"), err=True)
        return {}


def _tensors_by_namespace(tensors: Mapping[str, Any]) -> dict[str, Tensors]:
    found: dict[str, Tensors] = {}
    for key, entry in tensors.items():
        name, bytes_ = key.partition(".")[0], entry.size.numel() * entry.properties.dtype.itemsize
        before = found.get(name, Tensors(tensors=0, bytes=0))
        found[name] = Tensors(tensors=before.tensors + 1, bytes=before.bytes + bytes_)
    return found


def _installed(distribution: str) -> str | None:
    """The version of what is installed here."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _state_by_namespace(state: Mapping[str, Any]) -> dict[str, int]:
    """Versions of the state of callbacks and trackers."""
    entries = {**state.get("callbacks", {}), **state.get("trackers", {})}
    return {namespace: entry["version"] for namespace, entry in entries.items()}


def _changed_since(folder: Path) -> list[Difference]:
    """Keys in which the run's job differs now; nothing for a checkpoint without its run."""
    from forge_core.checkpoint.store import read_job

    run = folder.parent.parent
    if folder.parent.name != "checkpoints" or not (run / JOB).is_file():
        return []
    try:
        then, now = read_job(folder), read_job(run)
    except DamagedError as error:
        raise ConfigError(f"{folder} or its run cannot be read: {error}") from error
    return differences(then, now)


def _shared_bytes(folder: Path, manifest: Manifest) -> int:
    """In files that other checkpoints have, too (``checkpoint.frozen``)."""
    return sum(int(entry["bytes"]) for name, entry in manifest.files.items() if (folder / name).stat().st_nlink > 1)


def _described(shown: ShownCheckpoint) -> Iterable[str]:
    yield str(shown.path)
    yield f"step {shown.step}, {shown.tokens:,} tokens, written {shown.written}"
    yield f"{as_size(shown.bytes)} in {shown.files} files; mesh {mesh_words(shown.mesh) or 'one process'}"
    if shown.shared_bytes:
        yield f"{as_size(shown.shared_bytes)} of it shared with other checkpoints"
    for name, value in shown.metrics.items():
        yield f"{name} {value:g}"
    for namespace, amount in shown.tensors.items():
        yield f"{namespace}: {amount.tensors} tensors, {as_size(amount.bytes)}"
    for namespace, number in shown.state.items():
        yield f"{namespace}: state of version {number}"
    for name, one in shown.versions.items():
        now = "" if one.now == one.then else f" (now {one.now})" if one.now else " (not installed)"
        yield f"{name} {one.then}{now}"
    for change in shown.changed_since:
        yield f"the run's job has changed since: {change.key}: {change.old} -> {change.new}"


def _table(rows: Sequence[ListedCheckpoint], *, has_mirror: bool) -> str:
    lines = [["STEP", "WRITTEN", "SIZE", "TOKENS", "MESH", "STATE", *(["MIRROR"] if has_mirror else []), "KEPT BY"]]
    for row in rows:
        there = [_state(row.mirror)] if has_mirror else []
        if row.written is None or row.bytes is None or row.mesh is None:
            lines.append([str(row.step), *"----", f"damaged: {row.damage}", *there, "-"])
            continue
        kept = "-" if row.kept_by is None else ", ".join(row.kept_by) or "nothing: prune removes it"
        amounts = [as_size(row.bytes), f"{row.tokens:,}", mesh_words(row.mesh) or "one process"]
        state = "whole" if row.path else "not here"
        lines.append([str(row.step), row.written, *amounts, state, *there, kept])
    return "\n".join(aligned(lines))


def _state(at_mirror: str | None) -> str:
    return {None: "-", "whole": "whole"}.get(at_mirror) or f"damaged: {at_mirror}"
