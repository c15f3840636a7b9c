"""The ranks of ``ep`` by the nodes that they are on."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import attrs
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forge_core.errors import ConfigError


@attrs.frozen(eq=False)
class Nodes:
    """As many ranks of ``ep`` on each, in the order of ``ep``."""

    count: int
    ranks_each: int

    @classmethod
    def of(cls, mesh: DeviceMesh, ranks_per_node: int | None, key: str) -> Nodes:
        """
        Args:
            mesh: one dimension.
            ranks_per_node: of all ranks, not only those of ``mesh``; by default what the launcher says.
            key: where ``ranks_per_node`` is set, for errors.

        Raises:
            ConfigError: the launcher does not say, or nodes have different numbers of the mesh's ranks.
        """
        on_each: dict[int, int] = {}
        size = ranks_per_node or launched_ranks_per_node(key)
        for rank in mesh.mesh.flatten().tolist():
            on_each[rank // size] = on_each.get(rank // size, 0) + 1
        numbers = {*on_each.values()}
        if len(numbers) > 1:
            raise ConfigError(
                f"{key}: with {size} ranks a node, the {mesh.size()} ranks of parallel.ep are not shared out evenly to "
                f"{len(on_each)} nodes; let ep be a divisor or a multiple of the ranks a node"
            )
        return cls(len(on_each), numbers.pop())


@attrs.frozen(eq=False)
class NodeGroups:
    """The groups of a rank over which rows travel in two steps; ``None`` is a group of this rank alone."""

    between: dist.ProcessGroup | None
    """The ranks at this one's place on every node."""
    within: dist.ProcessGroup | None
    """The ranks of its node."""

    @classmethod
    def of(cls, mesh: DeviceMesh, nodes: Nodes) -> NodeGroups:
        """Made once, whoever asks how often; all ranks of ``mesh`` have to ask, and no others."""
        grid = mesh.mesh.view(nodes.count, nodes.ranks_each)
        node, place = divmod(mesh.get_local_rank(), nodes.ranks_each)
        return cls(_group(grid[:, place].tolist(), mesh), _group(grid[node].tolist(), mesh))


_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""By the group of ``ep`` of which they are parts, which is another one in each run."""


def _group(ranks: list[int], mesh: DeviceMesh) -> dist.ProcessGroup | None:
    whole = mesh.get_group()
    if len(ranks) in (1, mesh.size()):
        return None if len(ranks) == 1 else whole
    made = _MADE.setdefault(whole, {})
    if tuple(ranks) not in made:
        # other stages of a pipeline may have no experts, and would not be there to make it
        made[*ranks,] = dist.new_group(ranks, use_local_synchronization=True, group_desc="nodes_of_ep")
    return made[*ranks,]


def launched_ranks_per_node(key: str) -> int:
    """Ranks on this node, as torchrun and Slurm launchers say it.

    Raises:
        ConfigError: they do not say.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(
            f"{key}: the launcher does not say by LOCAL_WORLD_SIZE how many ranks are on a node; set it here"
        )
    return int(size)
