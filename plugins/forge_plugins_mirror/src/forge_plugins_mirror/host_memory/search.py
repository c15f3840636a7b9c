"""Finding the newest checkpoint that is whole in the memory of the nodes that are there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from forge_core.checkpoint.contents import JOB, STATE, resume_problem
from forge_core.checkpoint.manifest import FILE_NAME, DamagedError, Manifest, damage, read_manifest, write_manifest
from forge_core.checkpoint.safe_reader import read_description
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.errors import ConfigError, and_more
from forge_plugins_mirror.host_memory.checkpoint import MemoryCheckpoint
from forge_plugins_mirror.host_memory.history import History
from forge_plugins_mirror.host_memory.node import NodeFolder, Nodes

TENSORS = ".distcp"
"""How the names of files end that have tensors, and lie on one node and the next. Each node has all others."""


@attrs.frozen(order=True)
class _Candidate:
    """A checkpoint of which at least one node has a part."""

    step: int
    stretch: str
    digest: str
    """Of its manifest."""


class Search:
    """All ranks make one and ask it together.

    Args:
        say: told why a newer checkpoint is passed over.
    """

    def __init__(self, folder: NodeFolder, nodes: Nodes, history: History, say: Callable[[str], None]) -> None:
        self._folder, self._nodes, self._history, self._say = folder, nodes, history, say

    def newest(self) -> MemoryCheckpoint | None:
        """The newest one of this run that is whole; each part is compared with the manifest."""
        of_nodes = self._of_leaders(self._here())
        for candidate in sorted({one for here in of_nodes for one in here}, reverse=True):
            nodes = [number for number, here in enumerate(of_nodes) if candidate in here]
            manifest = self._from_node(nodes[0], partial(self._manifest, candidate))
            found = self._opened(candidate, manifest)
            if isinstance(found, MemoryCheckpoint):
                return found
            self._say(f"the checkpoint of step {candidate.step} in memory cannot be used: {found}")
        return None

    def _here(self) -> list[_Candidate]:
        """Candidates on this node."""
        last_steps = self._history.last_steps()
        found = []
        for stretch, store in self._folder.stores():
            for step in store.steps():
                folder = store.folder(step)
                if step > last_steps.get(stretch, -1):
                    continue  # of steps that were given up
                try:
                    read_manifest(folder)
                    digest = hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest()
                except (DamagedError, OSError):
                    continue  # its other nodes may have it whole
                found.append(_Candidate(step, stretch, digest))
        return found

    def _manifest(self, candidate: _Candidate) -> Manifest:
        return read_manifest(self._path(candidate))

    def _path(self, candidate: _Candidate) -> Path:
        return self._folder.store(candidate.stretch).folder(candidate.step)

    def _opened(self, candidate: _Candidate, manifest: Manifest) -> MemoryCheckpoint | str:
        """Open it, or return what is wrong with it. The same on all ranks."""
        path = self._path(candidate)
        holders, problem = self._holders(path, manifest)
        if missing := sorted(name for name, nodes in holders.items() if not nodes):
            why = f" ({problem})" if problem else ", as of nodes that are gone"
            return f"{len(missing)} of its {len(holders)} files are whole on no node that is here{why}"
        beside = {name for name in holders if not name.endswith(TENSORS)}
        complete = [number for number in range(len(self._nodes.ranks)) if all(number in holders[one] for one in beside)]
        if not complete:
            return f"no node has all of {', '.join(sorted(beside)[:3])}{and_more(len(beside), 3)}"
        texts = self._from_node(complete[0], lambda: {name: (path / name).read_bytes() for name in sorted(beside)})
        try:
            run_on_all_ranks(lambda: self._complete(path, manifest, texts, holders))
        except ConfigError as error:  # on all ranks: the memory is full, for instance, and the disk may have another
            return str(error)
        if unfit := run_on_rank0(lambda: resume_problem(path)):
            return unfit
        places = run_on_all_ranks(lambda: _description(path))
        files = {name: nodes for name, nodes in holders.items() if name.endswith(TENSORS)}
        known = {name: texts[name] for name in (STATE, JOB) if name in texts}
        return MemoryCheckpoint(path, manifest, places, known, self._nodes, files)

    def _holders(self, path: Path, manifest: Manifest) -> tuple[dict[str, set[int]], str]:
        """The nodes that have each file as it was written, and what is wrong with one that is not. The ranks of a node
        share its files."""
        ranks = self._nodes.ranks[self._nodes.number]
        own = sorted(manifest.files)[self._nodes.place :: len(ranks)]
        found = {name: damage(path, {name: manifest.files[name]}) for name in own if (path / name).exists()}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, found)
        holders: dict[str, set[int]] = {name: set() for name in manifest.files}
        problem = ""
        for number, of_node in enumerate(self._nodes.ranks):
            for rank in of_node:
                for name, damaged in told[rank].items():
                    if damaged is None:
                        holders[name].add(number)
                    problem = problem or damaged or ""
        return holders, problem

    def _complete(
        self, path: Path, manifest: Manifest, texts: Mapping[str, bytes], holders: Mapping[str, set[int]]
    ) -> None:
        """Give this node what it lacks of the files that each node has."""
        if not self._nodes.leads:
            return
        number = self._nodes.number
        try:
            for name, content in texts.items():
                if number not in holders[name]:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    (path / name).unlink(missing_ok=True)
                    (path / name).write_bytes(content)
            if not (path / FILE_NAME).is_file():
                write_manifest(path, manifest)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}; make room") from error

    def _of_leaders(self, value: Any) -> list[Any]:
        """What the first rank of each node has."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, value if self._nodes.leads else None)
        return [told[ranks[0]] for ranks in self._nodes.ranks]

    def _from_node(self, number: int, read: Callable[[], Any]) -> Any:
        """What the first rank of a node reads."""
        source = self._nodes.ranks[number][0]
        found = [run_on_all_ranks(read) if self._nodes.rank == source else run_on_all_ranks(lambda: None)]
        dist.broadcast_object_list(found, src=source)
        return found[0]


def _description(path: Path) -> Any:
    try:
        return read_description(path)
    except DamagedError as error:
        raise ConfigError(f"checkpoint {path} cannot be used: {error}") from error
