"""Saving into the memory of the nodes, while training goes on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from forge_core.checkpoint.file_system import NamingFileSystem
from forge_core.checkpoint.manifest import Manifest, write_manifest
from forge_core.checkpoint.saver import Snapshot, Staging
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.distributed.timeouts import CHECKPOINT_GROUP
from forge_core.errors import ForgeError, MirrorError
from forge_plugins_mirror.host_memory.history import History
from forge_plugins_mirror.host_memory.node import NodeFolder, Nodes
from forge_plugins_mirror.host_memory.search import TENSORS
from forge_plugins_mirror.host_memory.transfers import Transfer, exchange


@attrs.frozen
class Kept:
    """How a save has ended."""

    step: int
    error: ForgeError | None
    n_bytes: int
    """Of the whole checkpoint, on all nodes, without copies."""
    seconds: float
    """From the copy of the tensors to the end."""
    seconds_blocked: float
    """The seconds of these that training waited."""


@attrs.frozen
class _Described:
    """What rank 0 tells all about a checkpoint whose tensors are written."""

    manifest: Manifest
    owners: Mapping[str, int]
    """The rank that has written each file of tensors."""
    texts: Mapping[str, bytes]
    """All other files."""


class Keeper:
    """All ranks call the same methods at the same steps. One save at a time.

    Args:
        timeout: seconds that a rank waits for the others while it saves.
        history: of the run, from here on.
        may_commit: called on rank 0 right before a checkpoint gets its name; what it raises prevents that.
    """

    def __init__(
        self, folder: NodeFolder, nodes: Nodes, history: History, timeout: float, may_commit: Callable[[], None]
    ) -> None:
        self._folder, self._nodes, self.history = folder, nodes, history
        self._timeout, self._may_commit = timeout, may_commit
        self._group = self._new_group()
        self._staging: Staging | None = None
        self._left_to_others: frozenset[str] = frozenset()
        """Keys of tensors that several ranks have whole, and that another one writes."""
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[Kept] = SimpleQueue()
        self.has_lost_others = False
        """The ranks may be at different places in a save: they need another group."""

    @property
    def is_busy(self) -> bool:
        """On this rank; others may have ended, or not."""
        return self._thread is not None and self._thread.is_alive()

    def keep(self, snapshot: Snapshot) -> None:
        """Begin to save. No rank may be busy."""
        started = time.perf_counter()
        if self._staging is None:
            devices = {tensor.device.type: tensor.device for tensor in snapshot.tensors.values()}
            self._staging = Staging(devices.get("cuda", torch.device("cpu")))
        own = {key: tensor for key, tensor in snapshot.tensors.items() if key not in self._left_to_others}
        tensors = self._staging.copy(own)
        blocked = time.perf_counter() - started
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, tensors, started, blocked), name="forge-host-memory", daemon=True
        )
        self._thread.start()

    def keep_only(self, step: int) -> None:
        """Remove all but the checkpoint of ``step``, from which the run goes on: there is room for one more. No rank
        may be busy."""
        if self._nodes.leads:
            counting = [name for name, last in self.history.last_steps().items() if step <= last]
            self._folder.keep_only(counting, step)

    def wait_until_copied(self) -> None:
        """Before the tensors change."""
        if self._staging is not None:
            self._staging.wait()

    def wait(self, seconds: float | None = None) -> None:
        """For the save that is under way, so long at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def outcomes(self) -> list[Kept]:
        """What has ended since this was last asked."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self._outcomes.get_nowait())
        return found

    def meet_again(self) -> None:
        """After ``has_lost_others`` on any rank, on all of them."""
        dist.destroy_process_group(self._group)
        self._group, self.has_lost_others = self._new_group(), False

    def close(self) -> None:
        """Let go of the copies, unless they are being written."""
        if self._staging is not None and not self.is_busy:
            self._staging.close()

    def _new_group(self) -> dist.ProcessGroup:
        limit = timedelta(seconds=self._timeout)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit, group_desc=CHECKPOINT_GROUP)
        return group

    def _write(
        self, snapshot: Snapshot, tensors: Callable[[], Mapping[str, torch.Tensor]], started: float, blocked: float
    ) -> None:
        store = self._folder.store(self.history.stretch)
        folder = store.unfinished_folder(snapshot.step, "memory")
        error: ForgeError | None = None
        n_bytes = 0
        try:
            manifest = self._write_and_commit(snapshot, tensors(), folder)
            n_bytes = manifest.n_bytes
        except ForgeError as caught:  # on all ranks alike
            error = caught
        except Exception as caught:  # noqa: BLE001 - any failure is reported where training can hear it
            self.has_lost_others = True
            error = MirrorError(f"{type(caught).__name__}: {caught}")
            error.__cause__ = caught
        if error is not None and self._nodes.leads:
            shutil.rmtree(folder, ignore_errors=True)
        if error is not None:
            error.args = (f"checkpoint of step {snapshot.step} in memory: {error}",)
        self._outcomes.put(Kept(snapshot.step, error, n_bytes, time.perf_counter() - started, blocked))

    def _write_and_commit(self, snapshot: Snapshot, tensors: Mapping[str, torch.Tensor], folder: Path) -> Manifest:
        nodes, store = self._nodes, self._folder.store(self.history.stretch)
        self._together(lambda: _made_anew(folder) if nodes.leads else None)
        described = self._described(snapshot, folder, self._write_tensors(tensors, folder))
        self._together(lambda: self._copy_to_next(described, folder))

        def complete() -> None:
            if nodes.leads:
                _complete(folder, described)
            if nodes.rank == 0:
                self._may_commit()

        self._together(complete)  # before any node gives it its name
        self._together(lambda: store.commit(folder, snapshot.step) if nodes.leads else None)
        self._together(lambda: self._forget_earlier(snapshot.step))  # all nodes have this one
        return described.manifest

    def _write_tensors(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Mapping[str, Any]]:
        """Return the entries of the files that this rank has written."""
        writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
        writer.fs = files = NamingFileSystem()
        try:
            save(dict(tensors), storage_writer=writer, planner=planner, process_group=self._group)
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise MirrorError(f"rank {rank} cannot write to {folder}: {type(cause).__name__}: {cause}") from error
        self._left_to_others |= tensors.keys() - {item.index.fqn for item in planner.plan.items}
        return {file.name: entry for file, entry in files.written.items() if file.suffix == TENSORS}

    def _described(self, snapshot: Snapshot, folder: Path, own: dict[str, Mapping[str, Any]]) -> _Described:
        is_first = self._nodes.rank == 0
        written: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(own, written, group=self._group)

        def describe() -> _Described | None:
            if written is None:
                return None
            entries = {name: entry for part in written for name, entry in part.items()}
            manifest = snapshot.describe(folder, entries)
            owners = {name: rank for rank, part in enumerate(written) for name in part}
            texts = {name: (folder / name).read_bytes() for name in manifest.files if name not in entries}
            return _Described(manifest, owners, texts)

        told: list[_Described] = [self._together(describe)]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]

    def _copy_to_next(self, described: _Described, folder: Path) -> None:
        nodes, files = self._nodes, described.manifest.files
        if len(nodes.ranks) == 1:
            return
        transfers = [
            Transfer(rank, nodes.copier_of(rank), name, files[name]["bytes"]) for name, rank in described.owners.items()
        ]
        for name, entry in exchange(transfers, folder, self._group).items():
            if entry != files[name]:
                raise MirrorError(f"the copy of {name} in {folder} is not what was written")

    def _forget_earlier(self, step: int) -> None:
        if self._nodes.leads:
            self._folder.keep_only([self.history.stretch], step)
        if self._nodes.rank == 0:
            self._may_commit()  # removing may have taken long; and the file may be another attempt's by now
            self.history = attrs.evolve(self.history, newest=f"step_{step:08d}")
            self.history.write()

    def _together(self, work: Callable[[], Any]) -> Any:
        def explained() -> Any:
            try:
                return work()
            except OSError as error:
                words = f"{error.filename or self._folder.path}: {error.strerror or error}"
                raise MirrorError(f"rank {self._nodes.rank} cannot write to {words}") from error

        return run_on_all_ranks(explained, self._group)


def _made_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _complete(folder: Path, described: _Described) -> None:
    """On each node: the files that all nodes have, and the manifest."""
    for name, content in described.texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder, described.manifest)
