"""Writing checkpoints, in the background where asked: copied, written aside, described, and renamed."""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from forge_core.checkpoint.file_system import NamingFileSystem, TensorWriter
from forge_core.checkpoint.frozen_files import FOLDER, FrozenFiles
from forge_core.checkpoint.fsync import flush, flush_tree, write_durably
from forge_core.checkpoint.manifest import Manifest, as_size, describe_files, lack_of_room, write_manifest
from forge_core.checkpoint.save_plan import RememberedPlan
from forge_core.checkpoint.store import CheckpointStore
from forge_core.distributed.collective_errors import any_rank, run_on_all_ranks, run_on_rank0
from forge_core.distributed.timeouts import CHECKPOINT_GROUP
from forge_core.errors import ForgeError, SaveError


@attrs.frozen(kw_only=True)
class Snapshot:
    """Everything that goes into one checkpoint."""

    step: int
    tokens: int
    tensors: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """By key; ``DTensor``s are written by the ranks that hold their parts."""
    state: Mapping[str, Any]
    """JSON values: everything that is not a tensor."""
    mesh: Mapping[str, int] = attrs.field(factory=dict)
    versions: Mapping[str, str]
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    write_more: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
    """Called on rank 0 with the folder, for files to go with it; returns more of ``state``."""
    frozen: frozenset[str] = frozenset()
    """Keys of tensors, of all ranks, that are the same in each checkpoint of the run, and that it is to have once."""

    def without_frozen(self) -> Snapshot:
        """The same without these tensors."""
        tensors = {key: tensor for key, tensor in self.tensors.items() if key not in self.frozen}
        return attrs.evolve(self, tensors=tensors, frozen=frozenset())

    def describe(self, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Manifest:
        """Write what goes beside the tensors into ``folder``, on rank 0, and describe all of the checkpoint.

        Args:
            files: entries of the manifest for the files of tensors.
        """
        more = self.write_more(folder)
        write_durably(folder / "state.json", json.dumps({**self.state, **more}, indent=1))
        every = [file for file in folder.rglob("*") if file.is_file()]
        others = [file for file in every if file.relative_to(folder).as_posix() not in files]
        return Manifest(
            step=self.step,
            tokens=self.tokens,
            mesh=dict(self.mesh),
            versions=dict(self.versions),
            files=dict(sorted({**files, **describe_files(folder, others)}.items())),
            written=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            metrics=dict(self.metrics),
        )


@attrs.frozen
class Saved:
    """How a save has ended, on every rank alike."""

    step: int
    path: Path
    error: ForgeError | None
    seconds: float
    """From the call of ``save`` to the end."""
    seconds_blocked: float
    """The seconds of these that training waited."""


class Staging:
    """Copies of this rank's tensors in the host's memory, whose place is kept for the next time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=on_gpu, use_non_blocking_copy=on_gpu
        )
        self._stager = DefaultStager(options)
        # torch 2.11 closes this after every staging, and has closed it for good; later ones do not
        copies: Any = self._stager._state_dict_stager
        self._release, copies.close = copies.close, lambda: None
        self._staging: Any = None

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Begin to copy. What it returns waits for the copies, in any thread; they stay as they are until the next."""
        if self._device.type == "cuda":  # torch copies on a stream of its own, which waits for nothing
            torch.cuda.current_stream(self._device).synchronize()
        staged = self._stager.stage(dict(tensors))
        self._staging = staged if hasattr(staged, "result") else None
        return staged.result if hasattr(staged, "result") else lambda: staged

    def wait(self) -> None:
        """Call it before anything that is being copied changes: else the copies would hold two steps' values."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def close(self) -> None:
        """Let go of the copies."""
        self._stager.close()
        self._release()


class Saver:
    """All ranks call the same methods at the same steps.

    Args:
        store: where checkpoints go.
        background: whether training goes on while files are written. It costs a copy of this rank's tensors in host
            memory, which is kept for the next time.
        timeout: seconds that a rank waits for the others while it saves.
        may_commit: called on rank 0 right before the checkpoint gets its name; what it raises prevents that.
        known: a whole checkpoint that the run goes on from, whose frozen tensors are those of the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        device: torch.device,
        *,
        background: bool,
        timeout: float,
        may_commit: Callable[[], None],
        known: Path | None = None,
    ) -> None:
        self._store = store
        self._frozen = FrozenFiles(store.path, known)
        self._background = background
        self._may_commit = may_commit
        self._timeout = timeout
        self._group = self._new_group()
        self._attempt = run_on_rank0(lambda: uuid.uuid4().hex[:12], self._group)
        self._staging = Staging(device)
        self._plan = RememberedPlan()
        self._thread: threading.Thread | None = None
        self._is_committed = False
        self._is_group_lost = False
        self._own: Saved | None = None
        """How this rank's part in a save has ended."""

    @property
    def is_writing(self) -> bool:
        """On this rank; others may have finished, or not."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, snapshot: Snapshot) -> None:
        """Begin a checkpoint, and in the foreground finish it. ``finish`` the one before it first."""
        assert self._thread is None, "one at a time: finish() the last one first"
        started = time.perf_counter()
        if snapshot.frozen and self._are_shared(snapshot):
            snapshot = snapshot.without_frozen()
        if not self._background:
            self._write(snapshot, lambda: snapshot.tensors, started)
            return
        tensors = self._staging.copy(snapshot.tensors)
        blocked = time.perf_counter() - started
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, tensors, started, blocked), name="forge-checkpoint"
        )
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Same as ``Staging.wait``."""
        self._staging.wait()

    def finish(self) -> Saved | None:
        """Wait for the save that is under way, on all ranks. Returns how it ended, once; ``None`` if there was none."""
        own = self._join()
        return None if own is None else self._agreed(own)

    def close(self) -> Saved | None:
        """After the last ``finish``; or when the run has failed, and the other ranks may be gone: waits for what this
        rank is writing, and returns how that ended as far as this rank knows."""
        own = self._join()
        self._staging.close()
        return own

    def _are_shared(self, snapshot: Snapshot) -> bool:
        """Return whether a checkpoint before has the frozen tensors. All ranks get the answer of rank 0."""
        modules = snapshot.state.get("modules", {})
        return run_on_rank0(lambda: self._frozen.take(snapshot.frozen, modules), self._group)

    def _join(self) -> Saved | None:
        self.wait_until_copied()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        own, self._own = self._own, None
        return own

    def _agreed(self, own: Saved) -> Saved:
        """The outcome on rank 0, which gives checkpoints their names. If ranks have lost each other in the group
        over which they save, as after one that was too slow, nothing more can be said over it, and they get another."""
        if dist.get_world_size() == 1:
            return own
        error = own.error
        said = run_on_rank0(lambda: None if error is None else str(error))
        if any_rank(self._is_group_lost)[0]:
            dist.destroy_process_group(self._group)
            self._group = self._new_group()
        if said is None:
            return attrs.evolve(own, error=None)
        agreed = SaveError(said) if error is None else type(error)(said)
        agreed.__cause__ = error
        return attrs.evolve(own, error=agreed)

    def _new_group(self) -> dist.ProcessGroup:
        limit = timedelta(seconds=self._timeout)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit, group_desc=CHECKPOINT_GROUP)
        return group

    def _write(
        self,
        snapshot: Snapshot,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        started: float,
        blocked: float | None = None,
    ) -> None:
        path, error = self._store.folder(snapshot.step), None
        self._is_committed = self._is_group_lost = False
        try:
            self._write_and_commit(snapshot, tensors())
        except ForgeError as caught:  # on all ranks alike
            error = caught
        except Exception as caught:  # noqa: BLE001 - any failure is reported where training can hear it
            self._is_group_lost = True
            if not self._is_committed:
                limit = f" (checkpoint.timeout = {self._timeout:g})" if dist.get_world_size() > 1 else ""
                error = SaveError(f"{type(caught).__name__}: {caught}{limit}")
                error.__cause__ = caught
        seconds = time.perf_counter() - started
        self._own = Saved(snapshot.step, path, error, seconds, seconds if blocked is None else blocked)

    def _write_and_commit(self, snapshot: Snapshot, tensors: Mapping[str, torch.Tensor]) -> None:
        folder = self._store.unfinished_folder(snapshot.step, self._attempt)
        first = dist.get_rank() == 0
        n_bytes = self._bytes_to_write(snapshot)
        try:
            self._together(lambda: self._begin(folder, n_bytes) if first else None, n_bytes)
            try:
                own = self._write_tensors(snapshot, folder, tensors)
            except CheckpointException as error:
                rank, (cause, _) = min(error.failures.items())
                raise SaveError(_cannot_write(rank, folder, cause, n_bytes)) from error
            written: list[Any] | None = [None] * dist.get_world_size() if first else None
            dist.gather_object(own, written, group=self._group)
            entries = {name: entry for part in written or [] for name, entry in part.items()}
            self._together(lambda: self._commit(snapshot, folder, entries) if first else None, n_bytes)
        except BaseException:
            if first:
                shutil.rmtree(folder, ignore_errors=True)  # or the disk would be fuller with every attempt
            raise

    def _write_tensors(
        self, snapshot: Snapshot, folder: Path, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Mapping[str, Any]]:
        """Frozen ones into files of their own. Returns the entries of the files that this rank has written."""
        files = NamingFileSystem()
        frozen = {key: tensor for key, tensor in tensors.items() if key in snapshot.frozen}
        others = {key: tensor for key, tensor in tensors.items() if key not in frozen}
        for place, part, plan in ((folder / FOLDER, frozen, RememberedPlan()), (folder, others, self._plan)):
            if snapshot.frozen or place == folder:  # as on all ranks, of which some have no part in it
                writer = TensorWriter(place)
                writer.fs = files
                with plan.of(part, self._group) as planner:
                    save(dict(part), storage_writer=writer, planner=planner, process_group=self._group)
        written = {file.relative_to(folder).as_posix(): entry for file, entry in files.written.items()}
        return {name: entry for name, entry in written.items() if name.endswith(".distcp")}  # others are not final

    def _begin(self, folder: Path, n_bytes: int) -> None:
        """On rank 0."""
        self._store.path.mkdir(parents=True, exist_ok=True)
        for parent in self._store.path.parents[:2]:  # the run's and the runs' folder, which may be as new
            flush(parent)
        self._store.finish_removing()  # for their room
        shutil.rmtree(folder, ignore_errors=True)
        if lack := lack_of_room(self._store.path, n_bytes):
            raise SaveError(lack)
        folder.mkdir()
        self._frozen.put(folder)

    def _commit(self, snapshot: Snapshot, folder: Path, files: dict[str, Mapping[str, Any]]) -> None:
        """On rank 0: the rest of the files, the manifest, and the name. Everything is flushed before it is
        relied on, so that a power cut finds a whole checkpoint or none."""
        files |= self._frozen.describe(folder)
        manifest = snapshot.describe(folder, files)
        flush_tree(folder, files)  # which their ranks have flushed
        write_manifest(folder, manifest)
        flush(folder)
        self._may_commit()
        self._store.commit(folder, snapshot.step)
        self._is_committed = True
        self._frozen.committed(self._store.folder(snapshot.step))

    def _bytes_to_write(self, snapshot: Snapshot) -> int:
        """Each tensor once, of all pipeline stages: a ``DTensor`` counts whole, whoever holds its parts."""
        whole = sum(tensor.numel() * tensor.element_size() for tensor in snapshot.tensors.values())
        share = torch.tensor(whole * snapshot.mesh.get("pp", 1) / dist.get_world_size(), dtype=torch.float64)
        dist.all_reduce(share, group=self._group)
        return int(share)

    def _together(self, work: Callable[[], Any], n_bytes: int) -> Any:
        def explained() -> Any:
            try:
                return work()
            except OSError as error:
                raise SaveError(_cannot_write(dist.get_rank(), self._store.path, error, n_bytes)) from error

        return run_on_all_ranks(explained, self._group)


def _cannot_write(rank: int, folder: Path, cause: BaseException, n_bytes: int) -> str:
    """Say what went wrong where, what is needed and how full the disk is: neither torch nor the system names all of
    it."""
    path, why = folder, f"{type(cause).__name__}: {cause}"
    if isinstance(cause, OSError) and cause.strerror:
        path, why = Path(cause.filename or folder), cause.strerror
    try:
        free = f", and {as_size(shutil.disk_usage(folder).free)} are free"
    except OSError:
        free = ""
    return f"rank {rank} cannot write to {path}: {why}; the checkpoint needs {as_size(n_bytes)}{free}"
