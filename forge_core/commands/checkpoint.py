"""``forge checkpoint``: which checkpoints a run has, what is in them, whether they are whole; and removing some."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.checkpoint.compatibility import installed
from forge_core.checkpoint.contents import JOB, read_job
from forge_core.checkpoint.manifest import DamagedError, Manifest, as_size, read_manifest, visible_damage
from forge_core.checkpoint.retention import reasons_to_keep, superfluous
from forge_core.commands.table import aligned, wrapped
from forge_core.config.converter import structure
from forge_core.config.describe import printable
from forge_core.config.diff import differences
from forge_core.config.problems import ConfigProblems, InvalidError
from forge_core.config.sections import CheckpointSection, mesh_words
from forge_core.contracts.checkpoint_mirror import WRITER, CheckpointMirror, MirrorContext
from forge_core.contracts.command import Invocation
from forge_core.errors import ConfigError, ExitCode, MirrorError
from forge_core.registry.catalog import Catalog
from forge_core.run.lease import Lease

if TYPE_CHECKING:
    from forge_core.checkpoint.store import CheckpointStore

_PATH = click.argument("path", type=click.Path(path_type=Path))
_PATH_OR_URL = click.argument("path")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def checkpoint() -> None:
    """Look at the checkpoints of a run, and remove the ones that are not needed."""


@checkpoint.command("list")
@_PATH_OR_URL
@_JSON
@click.pass_obj
def list_checkpoints(obj: Invocation, path: str, as_json: bool) -> None:
    """List the checkpoints of the run in PATH, from the oldest, and those at its checkpoint.mirror; or of the run in a
    mirror's URL.

    A checkpoint is whole as far as the names and sizes of its files tell; `forge checkpoint verify` reads them.
    """
    here: dict[int, Manifest | str] = {}
    folders: dict[int, str] = {}
    if _is_url(path):
        mirror: CheckpointMirror | None = _mirror(path, "", CheckpointSection(), obj.catalog())
        section = CheckpointSection()
    else:
        run = _Run(Path(path), may_be_elsewhere=True)
        mirror, section = _mirror_or_warning(run, obj), run.section
        for step in run.store.steps():
            here[step], folders[step] = _look(run.store.folder(step)), str(run.store.folder(step))
    there = _look_there(mirror, must_answer=_is_url(path)) if mirror else {}
    reasons = reasons_to_keep([(step, one.metrics) for step, one in here.items() if isinstance(one, Manifest)], section)
    rows = []
    for step in sorted({*here, *there}):
        one = here.get(step, there.get(step))
        row: dict[str, Any] = {"step": step, "path": folders.get(step)}
        if isinstance(one, Manifest):
            row |= {"written": one.written, "bytes": one.n_bytes, "tokens": one.tokens, "mesh": dict(one.mesh)}
            row |= {"metrics": dict(one.metrics), "damage": None, "kept_by": reasons.get(step)}
        else:
            row["damage"] = one
        if mirror is not None:
            row["mirror"] = "whole" if isinstance(there.get(step), Manifest) else there.get(step)
        rows.append(row)
    click.echo(printable(_as_json(rows) if as_json else _table(rows) if rows else f"{path} has no checkpoints"))


@checkpoint.command()
@_PATH
@_JSON
def show(path: Path, as_json: bool) -> None:
    """Show what is in the checkpoint in PATH, or in the newest whole one of the run in PATH."""
    from forge_core.checkpoint.store import find_checkpoint

    found = find_checkpoint(path, lambda line: click.echo(printable(line), err=True))
    tensors = _tensors_by_namespace(found.saved_tensors())
    facts = {
        "path": str(found.path),
        "step": found.step,
        "tokens": found.manifest.tokens,
        "written": found.manifest.written,
        "bytes": found.manifest.n_bytes,
        "shared_bytes": _shared_bytes(found.path, found.manifest),
        "files": len(found.manifest.files),
        "mesh": dict(found.manifest.mesh),
        "metrics": dict(found.manifest.metrics),
        "tensors": tensors,
        "state": _state_by_namespace(found.state()),
        "versions": {name: {"then": then, "now": installed(name)} for name, then in found.manifest.versions.items()},
        "changed_since": _changed_since(found.path),
    }
    click.echo(printable(_as_json(facts) if as_json else "\n".join(map(wrapped, _described(facts)))))


@checkpoint.command()
@_PATH_OR_URL
@click.option("--mirror", "with_mirror", is_flag=True, help="Read those at the run's checkpoint.mirror, too.")
@click.pass_context
def verify(ctx: click.Context, path: str, with_mirror: bool) -> None:
    """Read every bit of the checkpoint in PATH, or of all those of the run in PATH, or in a mirror's URL.

    Exit codes: 0 all are whole, 2 one is damaged; what is wrong with it names the file.
    """
    are_whole = []
    for name, problem in _problems(path, with_mirror, ctx.obj):
        click.echo(printable(f"{name}: {problem or 'whole'}"))
        are_whole.append(problem is None)
    if not are_whole:
        raise ConfigError(f"{path} has no checkpoints")
    ctx.exit(ExitCode.COMPLETED if all(are_whole) else ExitCode.INVALID)


def _problems(path: str, with_mirror: bool, obj: Invocation) -> Iterator[tuple[str, str | None]]:
    from forge_core.checkpoint.store import whole_problem

    mirror: CheckpointMirror | None = None
    if _is_url(path):
        mirror = _mirror(path, "", CheckpointSection(), obj.catalog())
    elif _is_checkpoint(Path(path)):
        if with_mirror:
            raise ConfigError(f"--mirror: {path} is one checkpoint; give the directory of its run")
        yield str(Path(path).resolve()), whole_problem(Path(path).resolve())
    else:
        run = _Run(Path(path), may_be_elsewhere=with_mirror)
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
def prune(path: Path, keep_last: int | None, dry_run: bool) -> None:
    """Remove the checkpoints of the run in PATH that its [checkpoint] section does not keep.

    The newest one always stays, and damaged ones are not touched. Nothing is removed while the run trains.
    """
    run = _Run(path)
    if run.is_mirror:
        raise ConfigError(f"{path} is the mirror of a run, which prunes it as checkpoint.mirror_keep_last says")
    section = run.section if keep_last is None else attrs.evolve(run.section, keep_last=keep_last)
    if section.keep_last is None:
        raise ConfigError(f"{run.path / 'job.toml'} has no checkpoint.keep_last, so all are kept; give --keep-last N")
    if dry_run:
        _prune(run.store, section, dry_run=True)
        return
    lease = Lease(run.path, click.echo)  # no trainer can start, and none is running
    try:
        run.store.remove_unfinished()
        _prune(run.store, section, dry_run=False)
    finally:
        lease.give_back()


def _prune(store: CheckpointStore, section: CheckpointSection, *, dry_run: bool) -> None:
    manifests = {step: _look(store.folder(step)) for step in store.steps()}
    whole = {step: one for step, one in manifests.items() if isinstance(one, Manifest)}
    steps = superfluous([(step, one.metrics) for step, one in whole.items()], section)
    if not dry_run:
        store.remove(steps)
    for step in steps:
        click.echo(f"{'would remove' if dry_run else 'removed'} {store.folder(step).name}")
    for step in manifests.keys() - whole.keys():
        click.echo(printable(f"left {store.folder(step).name}, which is damaged: {manifests[step]}"))
    freed = as_size(sum(whole[step].n_bytes for step in steps))
    click.echo(f"{len(steps)} of {len(manifests)} checkpoints, {freed}")


class _Run:
    """The run that a path means: its directory, or the folder of its checkpoints.

    Args:
        may_be_elsewhere: all its checkpoints may be at its mirror.
    """

    def __init__(self, path: Path, *, may_be_elsewhere: bool = False) -> None:
        from forge_core.checkpoint.store import CheckpointStore

        if _is_checkpoint(path):
            raise ConfigError(f"{path} is one checkpoint; give the directory of its run")
        self.path = path.parent if path.name == "checkpoints" else path
        self.is_mirror = (self.path / WRITER).exists()
        self.store = CheckpointStore(self.path / "checkpoints")
        if not self.store.path.is_dir() and not (may_be_elsewhere and self.has_mirror):
            missing = "does not exist" if not path.exists() else "is not the directory of a run: it has no checkpoints/"
            raise ConfigError(f"{path} {missing}")

    @property
    def section(self) -> CheckpointSection:
        """The section of the last start of the run; if it is not readable the defaults, by which all are kept."""
        try:
            table = {key: value for key, value in self._job().get("checkpoint", {}).items() if key != "mirror"}
            section = structure(table, CheckpointSection, Catalog([]))
        except InvalidError as error:
            raise ConfigError(f"{self.path / 'job.toml'} is not what Forge wrote: {error}") from error
        return section.at_mirror() if self.is_mirror else section

    @property
    def has_mirror(self) -> bool:
        return "mirror" in self._job().get("checkpoint", {}) and not self.is_mirror

    def mirror(self, catalog: Catalog) -> CheckpointMirror:
        """Build the mirror of the run, which has one. Nothing is asked of it.

        Raises:
            ConfigError: its component is not installed, or does not take its keys.
        """
        chosen, name = self._job()["checkpoint"]["mirror"], self._job().get("run", {}).get("name", self.path.name)
        return _mirror(chosen, str(name), self.section, catalog, self.store.path)

    def _job(self) -> Mapping[str, Any]:
        if not (self.path / JOB).exists():
            return {}
        try:
            return read_job(self.path)
        except DamagedError as error:
            raise ConfigError(f"{self.path} is not what Forge wrote: {error}") from error


def _mirror(
    chosen: Any, run_name: str, section: CheckpointSection, catalog: Catalog, folder: Path | None = None
) -> CheckpointMirror:
    """Build the mirror that ``checkpoint.mirror`` chooses, or that a URL stands for."""
    from forge_core.config.builder import ComponentBuilder

    try:
        use = structure({"mirror": chosen}, CheckpointSection, catalog).mirror
    except InvalidError as error:
        raise ConfigProblems([problem.under("checkpoint") for problem in error.problems], "the mirror") from error
    assert use is not None, "it is chosen"
    context = MirrorContext(
        run_name=run_name,
        folder=folder or Path(),
        section=section,
        say=lambda line: click.echo(printable(line), err=True),
        run_on_rank0=lambda work: work(),
    )
    mirror: CheckpointMirror = ComponentBuilder(catalog)(use, context=context)
    return mirror


def _mirror_or_warning(run: _Run, obj: Invocation) -> CheckpointMirror | None:
    """Without the mirror's package, what is here is shown all the same."""
    if not run.has_mirror:
        return None
    try:
        return run.mirror(obj.catalog())
    except ConfigError as error:
        click.echo(printable(f"warning: {error}"), err=True)
        return None


def _is_url(path: str) -> bool:
    return "://" in path


def _is_checkpoint(path: Path) -> bool:
    return path.resolve().name.startswith("step_") or (path / "manifest.json").exists()


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


def _tensors_by_namespace(tensors: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for key, entry in tensors.items():
        namespace = found.setdefault(key.partition(".")[0], {"tensors": 0, "bytes": 0})
        namespace["tensors"] += 1
        namespace["bytes"] += entry.size.numel() * entry.properties.dtype.itemsize
    return found


def _state_by_namespace(state: Mapping[str, Any]) -> dict[str, int]:
    """Versions of the state of callbacks and trackers."""
    entries = {**state.get("callbacks", {}), **state.get("trackers", {})}
    return {namespace: entry["version"] for namespace, entry in entries.items()}


def _changed_since(folder: Path) -> list[dict[str, Any]]:
    """Keys in which the run's job differs now; nothing for a checkpoint without its run."""
    run = folder.parent.parent
    if folder.parent.name != "checkpoints" or not (run / JOB).is_file():
        return []
    try:
        then, now = read_job(folder), read_job(run)
    except DamagedError as error:
        raise ConfigError(f"{folder} or its run cannot be read: {error}") from error
    return [attrs.asdict(difference) for difference in differences(then, now)]


def _shared_bytes(folder: Path, manifest: Manifest) -> int:
    """In files that other checkpoints have, too (``checkpoint.frozen``)."""
    return sum(int(entry["bytes"]) for name, entry in manifest.files.items() if (folder / name).stat().st_nlink > 1)


def _described(facts: Mapping[str, Any]) -> Iterable[str]:
    yield facts["path"]
    yield f"step {facts['step']}, {facts['tokens']:,} tokens, written {facts['written']}"
    yield f"{as_size(facts['bytes'])} in {facts['files']} files; mesh {mesh_words(facts['mesh']) or 'one process'}"
    if facts["shared_bytes"]:
        yield f"{as_size(facts['shared_bytes'])} of it shared with other checkpoints"
    for name, value in facts["metrics"].items():
        yield f"{name} {value:g}"
    for namespace, amount in facts["tensors"].items():
        yield f"{namespace}: {amount['tensors']} tensors, {as_size(amount['bytes'])}"
    for namespace, number in facts["state"].items():
        yield f"{namespace}: state of version {number}"
    for name, versions in facts["versions"].items():
        then, now = versions["then"], versions["now"]
        yield f"{name} {then}" + ("" if now == then else f" (now {now})" if now else " (not installed)")
    for change in facts["changed_since"]:
        yield f"the run's job has changed since: {change['key']}: {change['old']} -> {change['new']}"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    has_mirror = "mirror" in rows[0]
    lines = [["STEP", "WRITTEN", "SIZE", "TOKENS", "MESH", "STATE", *(["MIRROR"] if has_mirror else []), "KEPT BY"]]
    for row in rows:
        there = [_state(row["mirror"])] if has_mirror else []
        if row["damage"] is not None:
            lines.append([str(row["step"]), *"----", f"damaged: {row['damage']}", *there, "-"])
            continue
        kept = "-" if row["kept_by"] is None else ", ".join(row["kept_by"]) or "nothing: prune removes it"
        amounts = [as_size(row["bytes"]), f"{row['tokens']:,}", mesh_words(row["mesh"]) or "one process"]
        state = "whole" if row["path"] else "not here"
        lines.append([str(row["step"]), row["written"], *amounts, state, *there, kept])
    return "\n".join(aligned(lines))


def _state(at_mirror: str | None) -> str:
    return {None: "-", "whole": "whole"}.get(at_mirror) or f"damaged: {at_mirror}"


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2)
