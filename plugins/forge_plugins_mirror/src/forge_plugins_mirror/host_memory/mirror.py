"""The mirror in the memory of the nodes: it saves by itself, every few steps, and is read where it lies."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
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
            history, goes_on = run_on_rank0(self._known)
            if history is not None and goes_on:
                folder = NodeFolder(self._config.folder, history.folder)
                self._found = Search(folder, find_nodes(folder), history, self._context.say).newest()
        return {} if self._found is None else {self._found.step: self._found.manifest}

    def open(self, step: int) -> Checkpoint | None:
        return self._found

    def begin(self, start: MirrorStart) -> None:
        self._found = None  # its description is large, and the run may go on from another one
        before, may_go_on = run_on_rank0(self._known)
        goes_on = may_go_on and start.step >= 0
        known = before if before is not None and goes_on else run_on_rank0(lambda: History.new(self._run_directory))
        history = known.going_on_from(start.step, start.attempt)
        folder = NodeFolder(self._config.folder, history.folder)
        nodes = find_nodes(folder)
        if before is not None and before.folder != history.folder and nodes.leads:
            NodeFolder(self._config.folder, before.folder).remove()
        self._refuse_too_little(folder, nodes, start.n_bytes)
        run_on_rank0(lambda: _write(history, start))
        keeper = Keeper(folder, nodes, history, self._context.section.timeout, start.refuse_if_lost)
        self._start, self._folder, self._keeper = start, folder, keeper
        run_on_all_ranks(lambda: keeper.keep_only(start.step))
        self._context.say(self._words(folder, nodes))

    def wants(self, step: int) -> bool:
        keeper = self._keeper
        if keeper is None or step % self._config.every:
            return False
        is_busy, have_lost_others = any_rank(keeper.is_busy, keeper.has_lost_others)
        if is_busy:
            if not self._has_left_one_out:
                self._context.say(
                    f"checkpoint.mirror.every = {self._config.every} is little: the checkpoint before is still being "
                    f"written into memory at step {step}, whose own is left out; training goes on"
                )
            self._has_left_one_out = True
            return False
        if have_lost_others:
            keeper.meet_again()
        return True

    def keep(self, snapshot: Snapshot) -> None:
        assert self._keeper is not None, "it has wanted this one"
        self._keeper.keep(snapshot)

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
        keeper, start = self._keeper, self._start
        if keeper is None or start is None:
            return
        keeper.wait()
        keeper.history = keeper.history.going_on_from(to, start.attempt)
        run_on_all_ranks(lambda: keeper.keep_only(to))  # they are gone also if the file cannot be written
        run_on_rank0(lambda: _write(keeper.history, start))

    def finish(self, seconds: float) -> None:
        """The run has saved its last step, or it is done: nothing in memory is needed any more."""
        keeper, start = self._keeper, self._start
        if self._folder is None or keeper is None or start is None:
            return
        keeper.wait(seconds)
        if any_rank(keeper.is_busy)[0]:
            return
        run_on_rank0(start.refuse_if_lost)
        folder, self._folder = self._folder, None
        run_on_all_ranks(folder.remove)
        run_on_rank0(lambda: (self._run_directory / FILE_NAME).unlink(missing_ok=True))

    def close(self) -> None:
        if self._keeper is None:
            return
        self._keeper.wait(_CLOSING)
        self._keeper.close()
        if self._folder is not None and any(store.steps() for _, store in self._folder.stores()):
            self._context.say(
                f"the last checkpoint in memory stays in {self._folder.path} on each node, for the next start of this "
                f"run; without one, remove it there: rm -r {self._folder.path}"
            )

    def _known(self) -> tuple[History | None, bool]:
        """On rank 0: what is known of the run, and whether it may be gone on from."""
        history = History.read(self._run_directory)
        return history, history is not None and history.has_last_start()

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
        # All ranks of a node have looked before one of them removes the folder.
        room = run_on_all_ranks(lambda: shutil.disk_usage(folder.path).free + folder.n_bytes())

        def refuse() -> None:
            if needed > room:
                with suppress(OSError):  # it stays if there are checkpoints of this run
                    folder.path.rmdir()
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


def _write(history: History, start: MirrorStart) -> None:
    start.refuse_if_lost()
    try:
        history.write()
    except OSError as error:
        raise MirrorError(f"checkpoint.mirror: cannot write {Path(history.directory) / FILE_NAME}: {error}") from error
