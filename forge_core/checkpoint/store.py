"""Where a run's checkpoints lie, and which of them can be used."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import ELOOP, ENOENT
from pathlib import Path
from stat import S_ISDIR
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from forge_core.checkpoint.contents import JOB, STATE, parse_job, parse_state, read_job, read_text
from forge_core.checkpoint.fsync import flush
from forge_core.checkpoint.garbage_collection import young_objects_alone
from forge_core.checkpoint.manifest import (
    FILE_NAME,
    DamagedError,
    Manifest,
    NewerFormatError,
    damage,
    read_manifest,
    visible_damage,
)
from forge_core.checkpoint.retention import reasons_to_keep, superfluous
from forge_core.checkpoint.run_mirror import NoMirror
from forge_core.checkpoint.safe_reader import read_description, read_tensors, refuse_misfits, saved_tensors
from forge_core.distributed.collective_errors import any_rank, gather, run_on_rank0
from forge_core.errors import ConfigError

__all__ = ["Checkpoint", "CheckpointStore", "find_checkpoint", "open_checkpoint", "read_job", "reasons_to_keep"]
__all__ += ["superfluous", "whole_problem"]
Result = TypeVar("Result")


@attrs.define(eq=False)
class Checkpoint:
    """A committed checkpoint, verified when it was opened.

    Its files: ``manifest.json``, ``state.json``, ``job.toml``, ``tokenizer/`` and those of torch DCP.
    """

    path: Path
    manifest: Manifest
    description: Metadata = attrs.field(repr=False)
    """Where the parts of each tensor lie, until ``forget_tensors`` is called."""
    _texts: Mapping[str, bytes]
    """``state.json`` and ``job.toml``, where they could be read."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def state(self) -> dict[str, Any]:
        """Everything that is not a tensor, as it was given to be saved.

        Raises:
            ConfigError: it cannot be read, or is no table of JSON values.
        """
        return self._read(lambda path: parse_state(self._texts.get(STATE) or read_text(path, STATE)))

    def job(self) -> dict[str, Any]:
        """The resolved job that wrote it, as plain data.

        Raises:
            ConfigError: it cannot be read, or is no TOML that stands alone.
        """
        return self._read(lambda path: parse_job(self._texts.get(JOB) or read_text(path, JOB)))

    def saved_tensors(self) -> Mapping[str, Any]:
        """Descriptions (``size``, ``properties.dtype``) of the tensors, by key."""
        return saved_tensors(self.description)

    def forget_tensors(self) -> None:
        """Give back the memory of their descriptions, gigabytes for a thousand ranks. None can be read from now on."""
        del self.description

    def refuse_misfits(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises as ``load`` does, and reads nothing. For ranks that must all know before they read together."""
        refuse_misfits(self.path, self.description, tensors)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read into the given tensors, each rank its own part.

        Raises:
            ConfigError: a key, shape or dtype is not what the checkpoint has, or what is stored is not what it says.
                Tensors of the checkpoint that are not asked for are the caller's business.
        """
        self._read(lambda path: read_tensors(path, self.description, tensors))

    def _read(self, read: Callable[[Path], Result]) -> Result:
        try:
            return read(self.path)
        except DamagedError as error:
            raise ConfigError(f"checkpoint {self.path} cannot be used: {error}") from error

    def read(self, key: str) -> torch.Tensor:
        """One tensor, whole, on the CPU.

        Raises:
            ConfigError: as ``load``.
        """
        entry = self.saved_tensors()[key]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.load({key: tensor})
        return tensor


class CheckpointStore:
    """The folder ``checkpoints/`` of a run. Which one is the newest is found by looking, never noted down.

    Args:
        mirror: checkpoints that are not here, or are damaged here, are fetched from it when they are asked for.
        problem_of: why one that is whole cannot be used, or ``None``.
    """

    def __init__(
        self, path: Path, mirror: NoMirror | None = None, problem_of: Callable[[Path], str | None] | None = None
    ) -> None:
        self.path = path
        self._mirror = mirror or NoMirror()
        self._problem_of = problem_of
        self._removal: threading.Thread | None = None

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies once it is committed."""
        return self.path / f"step_{step:08d}"

    def unfinished_folder(self, step: int, attempt: str) -> Path:
        """Where it is written, by one attempt at the run: another one that had been stopped and goes on does not get
        in its way."""
        return self.path / f".{self.folder(step).name}.{attempt}.partial"

    def steps(self) -> list[int]:
        """List the steps of all committed checkpoints, damaged or not, in ascending order."""
        names = (path.name.removeprefix("step_") for path in self.path.glob("step_*") if _may_be_folder(path))
        return sorted(int(name) for name in names if name.isdecimal())

    def newest(self, report: Callable[[str], None], before: int | None = None) -> Checkpoint | None:
        """The newest whole checkpoint; damaged ones are named to ``report`` and passed over. All ranks of a
        process group, if there is one, look at the same one and share the work.

        Args:
            before: only those of earlier steps than this.

        Raises:
            ConfigError: there are checkpoints, and none is whole: a fresh start would be mixed up with them. Or a later
                version of Forge has written one: what it has done since would be done again.
        """
        problems = []
        here = run_on_rank0(self.steps)
        far = self._mirror.steps(here)
        for step in sorted({*here, *far}, reverse=True):
            if before is not None and step >= before:
                continue
            found = self._opened(step, here, far, report)
            if isinstance(found, Checkpoint):
                return found
            problems.append(f"checkpoint {self.folder(step).name} cannot be used: {found}")
            report(f"{problems[-1]}; trying the one before it")
        if problems:
            raise ConfigError(
                f"none of the checkpoints in {self.path} can be used:\n  " + "\n  ".join(problems) + "\n"
                "Mend or move them, or start afresh: with another run.name, or with --resume never, which puts them "
                "aside."
            )
        return None

    def at(self, step: int, report: Callable[[str], None]) -> Checkpoint:
        """The checkpoint of a step.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        here = run_on_rank0(self.steps)
        far = self._mirror.steps(here)
        if step not in here and step not in far:
            there = ", ".join(map(str, sorted({*here, *far}))) or "none"
            raise ConfigError(f"{self.path} has no checkpoint of step {step}; there are {there}")
        found = self._opened(step, here, far, report)
        if not isinstance(found, Checkpoint):
            raise ConfigError(f"checkpoint {self.folder(step)} cannot be used: {found}")
        return attrs.evolve(found, path=found.path.resolve())

    def _opened(
        self, step: int, here: Sequence[int], far: Sequence[int], report: Callable[[str], None]
    ) -> Checkpoint | str:
        """Open a checkpoint, having fetched it if it is not here and whole; or return what is wrong with it."""
        folder = self.folder(step)
        problem = ""
        if step in far and (opened := self._mirror.open(step)) is not None:
            return opened
        if step in here:
            found = _usable(folder, self._problem_of)
            if isinstance(found, Checkpoint):
                return found
            run_on_rank0(lambda: _refuse_newer(folder))
            if step not in far:
                return found
            problem = f"{found}; "
        source = self._mirror.place
        report(f"{folder.name}: {problem or 'not here; '}fetching it from {source}")
        wrong_there = self._fetch(step)
        if wrong_there is not None:
            return f"{problem}at {source}, {wrong_there}"
        return _usable(folder, self._problem_of)

    def _fetch(self, step: int) -> str | None:
        """Fetch a checkpoint from the mirror and commit it. Returns its damage, or ``None``."""
        unfinished = run_on_rank0(lambda: self.unfinished_folder(step, uuid.uuid4().hex[:12]))

        def commit() -> None:
            try:
                self.commit(unfinished, step)
            except OSError as error:
                raise ConfigError(f"cannot write to {self.path}: {error.strerror}") from error

        try:
            problem = self._mirror.fetch(step, unfinished)
            if problem is None:
                run_on_rank0(commit)
            return problem
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def commit(self, unfinished: Path, step: int) -> None:
        """Give a written checkpoint its name. Called on rank 0, with everything flushed; once this returns, a
        power cut cannot take it back."""
        final = self.folder(step)
        unfinished.stat()  # gone if another attempt has taken over since the lease was looked at; then `final` is its
        if final.exists():  # damaged, or it would have been resumed from
            self._put_aside(final)
        unfinished.rename(final)
        flush(self.path)
        with suppress(OSError):  # for people; on a full disk they do without
            link = self.path / ".latest"
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            link.replace(self.path / "latest")

    def put_aside(self, after: int) -> Path | None:
        """Move the checkpoints of steps above ``after`` out of the way, where nothing looks for them and nothing is
        lost. Returns the folder they are in now, if there were any."""
        moved = [self._put_aside(self.folder(step)) for step in self.steps() if step > after]
        return moved[0].parent if moved else None

    def _put_aside(self, path: Path) -> Path:
        attempt = 1
        while (target := self.path.with_name(f"{self.path.name}.aside") / f"{path.name}.{attempt}").exists():
            attempt += 1
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        for folder in (target.parent, self.path, self.path.parent):
            flush(folder)
        return target

    def remove(self, steps: Sequence[int]) -> None:
        """Delete committed checkpoints."""
        self.begin_to_remove(steps)
        self.finish_removing()

    def begin_to_remove(self, steps: Sequence[int]) -> None:
        """They lose their names at once, so that half of one is never taken for one; their files go while the caller
        does something else: on a shared disk that can take longer than a step of training."""
        self.finish_removing()
        for step in steps:
            self.folder(step).rename(self.path / f".{self.folder(step).name}.removed")
        flush(self.path)
        self._removal = threading.Thread(target=self.remove_unfinished, args=(".step_*.removed",), name="forge-removal")
        self._removal.start()

    def finish_removing(self) -> None:
        """Wait until the files of what has been removed are gone."""
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def unfinished(self, pattern: str = ".step_*") -> Iterator[Path]:
        """Folders that a killed process left half written or half deleted, or another one is writing or deleting
        now."""
        return self.path.glob(pattern)

    def remove_unfinished(self, pattern: str = ".step_*") -> None:
        """Call it on rank 0, with nothing being saved."""
        for path in self.unfinished(pattern):
            shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(
    path: Path, report: Callable[[str], None], problem_of: Callable[[Path], str | None] | None = None
) -> Checkpoint:
    """The checkpoint that ``path`` means: itself, or the newest of a run. If there is a process group, all ranks of it
    call it together.

    Args:
        problem_of: as in ``CheckpointStore``.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    if run_on_rank0(lambda: _is_checkpoint(path)):
        return open_checkpoint(path, problem_of)
    found = CheckpointStore(path / "checkpoints", problem_of=problem_of).newest(report)
    if found is None:
        raise ConfigError(f"{path} holds no checkpoint; give a run's directory (forge checkpoint fetch asks a mirror)")
    return found


def _is_checkpoint(path: Path) -> bool:
    """Otherwise it is a run's directory."""
    try:
        return path.name.startswith("step_") or FILE_NAME in os.listdir(path)  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"there is no directory {path}; give a run's directory or a checkpoint's") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def open_checkpoint(path: Path, problem_of: Callable[[Path], str | None] | None = None) -> Checkpoint:
    """The checkpoint in ``path``, which may be a link to it, such as ``latest``. ``problem_of`` is as in
    ``CheckpointStore``.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        path = path.resolve()  # not through `latest`, which may move on while we read
    except (OSError, RuntimeError) as error:  # links in a circle, or a disk that fails
        raise ConfigError(f"checkpoint {path} cannot be used: {error}") from error
    found = _usable(path, problem_of)
    if not isinstance(found, Checkpoint):
        raise ConfigError(f"checkpoint {path} cannot be used: {found}")
    return found


def whole_problem(path: Path) -> str | None:
    """Find what is wrong with a checkpoint, down to the last bit, or ``None``: ranks share the reading, and all get
    the same answer."""
    found = _whole(path)
    return None if isinstance(found, Checkpoint) else found


def _usable(path: Path, problem_of: Callable[[Path], str | None] | None) -> Checkpoint | str:
    """Open a checkpoint, or return what is wrong with it, or why it cannot be used though it is whole. All ranks get
    the same answer."""
    found = _whole(path)
    if isinstance(found, Checkpoint) and problem_of is not None:
        return run_on_rank0(lambda: problem_of(path)) or found
    return found


def _whole(path: Path) -> Checkpoint | str:
    """Rank 0 reads for all what all must know, and looks at names and sizes; each rank reads a share of all bytes."""
    manifest = run_on_rank0(lambda: _manifest_of(path))
    if isinstance(manifest, str):
        return manifest
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problem = damage(path, _share(manifest.files, rank, ranks))
    if ranks > 1 and any_rank(problem is not None)[0]:
        problems = enumerate(gather(problem))
        problem = next(f"{one} (as rank {r} sees it)" if r else one for r, one in problems if one)
    with young_objects_alone():  # the others unpickle what rank 0 has read
        return problem or run_on_rank0(lambda: _read(path, manifest))


def _manifest_of(path: Path) -> Manifest | str:
    try:
        manifest = read_manifest(path)
    except DamagedError as error:
        return str(error)
    return visible_damage(path, manifest.files) or manifest


def _share(files: Mapping[str, Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Mapping[str, Any]]:
    """Files for each rank, of about as many bytes."""
    share, before, total = {}, 0, sum(entry["bytes"] for entry in files.values())
    for name in sorted(files):
        if min(before * ranks // max(total, 1), ranks - 1) == rank:
            share[name] = files[name]
        before += files[name]["bytes"]
    return share


def _read(path: Path, manifest: Manifest) -> Checkpoint | str:
    texts = {}
    for name in (STATE, JOB):
        with suppress(DamagedError):  # said once it is asked for
            texts[name] = read_text(path, name)
    try:
        return Checkpoint(path, manifest, read_description(path), texts)
    except DamagedError as error:
        return str(error)


def _refuse_newer(path: Path) -> None:
    try:
        read_manifest(path)
    except NewerFormatError as error:
        raise ConfigError(f"checkpoint {path} was written by a later version of Forge: {error}; upgrade it") from error
    except DamagedError:
        pass


def _may_be_folder(path: Path) -> bool:
    try:
        return S_ISDIR(path.stat().st_mode)
    except OSError as error:  # what else is wrong with it is said when it is looked at
        return error.errno not in (ENOENT, ELOOP)
