"""The mirror in the memory of the nodes: it saves by itself, every few steps, and is read where it lies."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge_core.checkpoint.manifest import DamagedError, Manifest, as_size
from forge_core.checkpoint.saver import Snapshot
from forge_core.checkpoint.store import Checkpoint
from forge_core.contracts.checkpoint_mirror import CheckpointMirror, MirrorContext, MirrorStart
from forge_core.distributed.collective_errors import any_rank, run_on_all_ranks, run_on_rank0
from forge_core.errors import ConfigError, MirrorError
from forge_plugins_mirror.config import HostMemoryConfig
from forge_plugins_mirror.host_memory.checkpoint import MemoryCheckpoint
from forge_plugins_mirror.host_memory.history import FILE_NAME, History
from forge_plugins_mirror.host_memory.keeper import Keeper
from forge_plugins_mirror.host_memory.node import NodeFolder, Nodes, find_nodes
from forge_plugins_mirror.host_memory.search import Search

_CLOSING = 5.0
"""Seconds that a save which is under way gets when a run has failed: the other ranks may be gone."""


class HostMemory(CheckpointMirror):
    """The last checkpoint stays until the next one is whole on all nodes."""

    def __init__(self, config: HostMemoryConfig, /, *, context: MirrorContext) -> None:
        self._config, self._context = config, context
        self._run_directory = context.folder.parent
        self._found: MemoryCheckpoint | None = None
        self._folder: NodeFolder | None = None
        self._keeper: Keeper | None = None
        self._start: MirrorStart | None = None
        self._has_left_one_out = False
        self.place = f"{config.folder} of each node"

    def available(self) -> Mapping[int, Manifest | DamagedError]:
        self._found = None
        if dist.is_initialized():  # no command has the memory of all nodes
            history = run_on_rank0(lambda: History.read(self._run_directory))
            if history is not None:
                folder = NodeFolder(self._config.folder, history.folder)
                self._found = Search(folder, find_nodes(folder), history, self._context.say).newest()
        return {} if self._found is None else {self._found.step: self._found.manifest}

    def open(self, step: int) -> Checkpoint | None:
        return self._found

    def begin(self, start: MirrorStart) -> None:
        before = run_on_rank0(lambda: History.read(self._run_directory))
        is_afresh = start.step < 0 or before is None
        history = run_on_rank0(
            lambda: (before if before and not is_afresh else History.new(self._run_directory)).going_on_from(start.step)
        )
        folder = NodeFolder(self._config.folder, history.folder)
        nodes = find_nodes(folder)
        if before is not None and is_afresh and nodes.leads:
            NodeFolder(self._config.folder, before.folder).remove()
        self._refuse_too_little(folder, nodes, start.n_bytes)
        run_on_rank0(lambda: _write(history))
        self._start, self._folder = start, folder
        self._keeper = Keeper(folder, nodes, history, self._context.section.timeout, start.refuse_if_lost)
        self._forget_after(start.step)
        self._context.say(self._words(folder, nodes))

    def after_step(self, step: int, take: Callable[[], Snapshot | None]) -> None:
        if step % self._config.every:
            return
        keeper = self._begun
        is_busy, have_lost_others = any_rank(keeper.is_busy, keeper.has_lost_others)
        if is_busy:
            if not self._has_left_one_out:
                self._context.say(
                    f"checkpoint.mirror.every = {self._config.every} is little: the checkpoint before is still being "
                    f"written into memory at step {step}, whose own is left out; training goes on"
                )
            self._has_left_one_out = True
            return
        if have_lost_others:
            keeper.meet_again()
        snapshot = take()
        if snapshot is not None:
            keeper.keep(snapshot)

    def wait_until_copied(self) -> None:
        if self._keeper is not None:
            self._keeper.wait_until_copied()

    def look(self) -> None:
        if self._keeper is None or self._start is None:
            return
        for kept in self._keeper.outcomes():
            if self._context.rank > 0:
                continue
            if kept.error is not None:
                self._start.failed(kept.step, kept.error)
            else:
                times = {"seconds": kept.seconds, "seconds_blocked": kept.seconds_blocked}
                self._start.write_event("kept_in_memory", step=kept.step, **times, bytes=kept.n_bytes)

    def rolled_back(self, to: int) -> None:
        keeper = self._begun
        keeper.wait()
        history = run_on_rank0(lambda: keeper.history.going_on_from(to))
        run_on_rank0(lambda: _write(history))
        keeper.history = history
        self._forget_after(to)

    def finish(self, seconds: float) -> None:
        """The run has saved its last step, or it is done: nothing in memory is needed any more."""
        if self._folder is None:
            return
        self._begun.wait(seconds)
        if any_rank(self._begun.is_busy)[0]:
            return
        folder, self._folder = self._folder, None
        run_on_all_ranks(folder.remove)
        run_on_rank0(lambda: (self._run_directory / FILE_NAME).unlink(missing_ok=True))

    def close(self) -> None:
        if self._keeper is None:
            return
        self._keeper.wait(_CLOSING)
        self._keeper.close()
        if self._folder is not None:
            self._context.say(
                f"the last checkpoint in memory stays in {self._folder.path} on each node, for the next start of this "
                f"run; without one, remove it there: rm -r {self._folder.path}"
            )

    @property
    def _begun(self) -> Keeper:
        assert self._keeper is not None, "begin has been called"
        return self._keeper

    def _forget_after(self, step: int) -> None:
        """Remove checkpoints of steps that were given up."""
        folder, history = self._folder, self._begun.history
        assert folder is not None, "begin has been called"
        run_on_all_ranks(lambda: folder.keep_only(history.stretch, step))

    def _refuse_too_little(self, folder: NodeFolder, nodes: Nodes, n_bytes: int) -> None:
        """
        Raises:
            ConfigError: there is no room for two checkpoints, of which the earlier stays until the later one is whole.
        """
        of_ranks: list[Any] = [0] * dist.get_world_size()
        dist.all_gather_object(of_ranks, n_bytes)
        number = nodes.number
        held = [number] if len(nodes.ranks) == 1 else [number, nodes.before(number)]
        needed = 2 * sum(of_ranks[rank] for node in held for rank in nodes.ranks[node])

        def refuse() -> None:
            room = shutil.disk_usage(folder.path).free + folder.n_bytes()
            if needed > room:
                copies = " and of their copies of the node before" if len(held) > 1 else ""
                raise ConfigError(
                    f"checkpoint.mirror.folder: on {socket.gethostname()}, {folder.path.parent} has {as_size(room)}, "
                    f"and two checkpoints of the {len(nodes.ranks[number])} ranks there{copies} take about "
                    f"{as_size(needed)}; give it more, use more nodes, or go without checkpoint.mirror"
                )

        run_on_all_ranks(refuse)

    def _words(self, folder: NodeFolder, nodes: Nodes) -> str:
        n_nodes = len(nodes.ranks)
        where = f"checkpoints every {self._config.every} steps into {folder.path}"
        if n_nodes == 1:
            return f"{where}; there is one node, so that they are lost with it"
        return f"{where} on {n_nodes} nodes, with a copy on the next node"


def _write(history: History) -> None:
    try:
        history.write()
    except OSError as error:
        raise MirrorError(f"checkpoint.mirror: cannot write {Path(history.directory) / FILE_NAME}: {error}") from error
