"""A checkpoint whose files lie in the memory of several nodes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from forge_core.checkpoint.store import Checkpoint
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.errors import ConfigError
from forge_plugins_mirror.host_memory.node import Nodes
from forge_plugins_mirror.host_memory.transfers import Transfer, exchange


@attrs.define(eq=False)
class MemoryCheckpoint(Checkpoint):
    """Each rank has it, with the path of its own node. All ranks load from it together."""

    nodes: Nodes
    holders: dict[str, set[int]]
    """The nodes that have each file of tensors, whole."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Same as ``Checkpoint.load``. Files that a node needs and does not have come from another node first."""
        self._bring(run_on_all_ranks(lambda: self._files_of(tensors)))
        super().load(tensors)

    def _files_of(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """The files that this rank reads."""
        self.refuse_misfits(tensors)
        plan = create_default_local_load_plan(dict(tensors), self.description)
        return {self.description.storage_data[item.storage_index].relative_path for item in plan.items}

    def _bring(self, names: set[str]) -> None:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, names)
        transfers = []
        for number, ranks in enumerate(self.nodes.ranks):
            needed = sorted({name for rank in ranks for name in of_ranks[rank]})
            for index, name in enumerate(name for name in needed if number not in self.holders[name]):
                holders = sorted(self.holders[name])
                there = self.nodes.ranks[holders[index % len(holders)]]
                source, target = there[index % len(there)], ranks[index % len(ranks)]
                transfers.append(Transfer(source, target, name, self.manifest.files[name]["bytes"]))
                self.holders[name].add(number)

        def bring() -> None:
            try:
                received = exchange(transfers, self.path)
            except OSError as error:
                raise ConfigError(
                    f"{socket.gethostname()} cannot write to {self.path}, to which files of other nodes come: "
                    f"{error.strerror}; make room"
                ) from error
            for name, entry in received.items():
                if entry != self.manifest.files[name]:
                    raise ConfigError(f"checkpoint {self.path}: the content of {name} is not what was written")

        if transfers:
            run_on_all_ranks(bring)
