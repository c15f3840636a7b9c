"""The nodes of a run, and the folder that the run has in the memory of each."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from forge_core.checkpoint.store import CheckpointStore
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.errors import ConfigError


@attrs.frozen
class Nodes:
    """Ranks that share a memory are a node."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each node. Nodes are in the order of their first ranks."""
    rank: int
    """This one."""

    @property
    def number(self) -> int:
        """This rank's node."""
        return next(number for number, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def place(self) -> int:
        """This rank's place in its node."""
        return self.ranks[self.number].index(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once a node."""
        return self.place == 0

    def before(self, number: int) -> int:
        """The node of which a node has copies."""
        return (number - 1) % len(self.ranks)

    def copier_of(self, rank: int) -> int:
        """The rank of the next node that gets a copy of what ``rank`` has written."""
        number = next(number for number, ranks in enumerate(self.ranks) if rank in ranks)
        there = self.ranks[(number + 1) % len(self.ranks)]
        return there[self.ranks[number].index(rank) % len(there)]


class NodeFolder:
    """The folder of a run in the memory of this rank's node. It is this user's alone.

    Args:
        root: as the job has it; ``$NAME`` is taken from the environment of each rank.
        name: of the folder; no other run has it.
    """

    def __init__(self, root: str, name: str) -> None:
        self._root = root
        self.path = Path(os.path.expandvars(root)) / name

    def make(self) -> None:
        """Make it, unless it is there.

        Raises:
            ConfigError: there can be none, or somebody else could write to it.
        """
        words = f"checkpoint.mirror.folder = {self._root!r}, on {socket.gethostname()}"
        root = self.path.parent
        if "$" in str(root):
            raise ConfigError(f"{words}: the environment does not have what the name needs; set it, or name a folder")
        if not root.is_absolute():
            raise ConfigError(f"{words}: {root} is no absolute path; name a folder in the node's memory, as /dev/shm")
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            found = self.path.lstat()
        except OSError as error:
            raise ConfigError(f"{words}: cannot make {self.path}: {error.strerror}; name another folder") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ConfigError(
                f"{words}: {self.path} is not a folder that this user alone can write to; somebody else could put "
                "other files in the place of this run's. Remove it, or name another folder"
            )

    def store(self, stretch: str) -> CheckpointStore:
        """The checkpoints of a stretch."""
        return CheckpointStore(self.path / stretch)

    def stores(self) -> Iterator[tuple[str, CheckpointStore]]:
        """Every stretch that is there, with its checkpoints."""
        if self.path.is_dir():
            names = sorted(one.name for one in self.path.iterdir() if one.is_dir() and not one.is_symlink())
            yield from ((name, self.store(name)) for name in names)

    def keep_only(self, stretches: Collection[str], step: int) -> None:
        """Remove all but the checkpoint of ``step`` in any of these stretches; what a crash has left half written, too.
        Called on one rank of a node, with nothing being written."""
        for name, store in self.stores():
            if name in stretches and step in (steps := store.steps()):
                store.remove([other for other in steps if other != step])
                store.remove_unfinished()
            else:
                shutil.rmtree(store.path)

    def n_bytes(self) -> int:
        """Bytes of all files in it."""
        return sum(file.lstat().st_size for file in self.path.rglob("*") if file.is_file())

    def remove(self) -> None:
        """Let go of all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def find_nodes(folder: NodeFolder) -> Nodes:
    """Make the folder, and find out which ranks see the same one. All ranks call it together.

    Raises:
        ConfigError: as ``NodeFolder.make``; or several hosts see the same folder, which is not the memory of one then.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    token = run_on_rank0(lambda: uuid.uuid4().hex[:12])

    def sign() -> Path:
        folder.make()
        file = folder.path / f".rank.{token}.{rank}"
        file.touch()
        return file

    own = run_on_all_ranks(sign)
    seen = tuple(sorted(int(file.name.rpartition(".")[2]) for file in folder.path.glob(f".rank.{token}.*")))
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, (seen, socket.gethostname()))
    own.unlink()
    nodes = sorted({node for node, _ in told})

    def refuse_shared() -> None:
        for node in nodes:
            hosts = sorted({told[one][1] for one in node})
            if len(hosts) > 1:
                raise ConfigError(
                    f"checkpoint.mirror.folder: {hosts[0]} and {hosts[1]} see the same {folder.path.parent}; name a "
                    "folder in the memory of each node, as /dev/shm"
                )

    run_on_rank0(refuse_shared)  # or each rank would say it
    return Nodes(tuple(nodes), rank)
