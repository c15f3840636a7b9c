"""A head that is tied to the embedding, in another pipeline stage."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import nn

from forge_core.ops.local_tensor import local_tensor


@attrs.frozen(kw_only=True, eq=False)
class TiedHead:
    """The last stage computes with a copy of the embedding's table, ``(V, D)``, which the first stage trains.

    Before a forward the first stage sends the table, and after a backward the last one sends the gradient of its copy.
    Both shard it alike, so that each rank exchanges its shard with one other rank, or, where a schedule puts both
    stages on one rank, with itself.
    """

    table: nn.Parameter | None
    """The embedding's, on a rank of the first stage."""
    copy: nn.Parameter | None
    """The head's, on a rank of the last stage."""
    group: dist.ProcessGroup
    """The ranks of this pipeline."""
    first: int
    last: int
    """The ranks in the group that hold these stages."""
    device: torch.device
    """Where ranks talk; parameters may be elsewhere."""
    is_trained: bool

    @torch.no_grad()
    def bring_table(self) -> None:
        """Give the copy the values of the table. All ranks call it."""
        values = None if self.table is None else local_tensor(self.table)
        arrived = self._carry(values, self.copy, self.first, self.last)
        if self.copy is not None and arrived is not None:
            local_tensor(self.copy).copy_(arrived)

    @torch.no_grad()
    def return_gradient(self) -> None:
        """Add the gradient of the copy to that of the table, and clear it. All ranks call it."""
        if not self.is_trained:
            return
        gradient = None
        if self.copy is not None:
            assert self.copy.grad is not None, "a backward has gone through the head"
            gradient, self.copy.grad = local_tensor(self.copy.grad), None
        arrived = self._carry(gradient, self.table, self.last, self.first)
        if self.table is not None and arrived is not None and self.table.grad is not None:
            local_tensor(self.table.grad).add_(arrived.to(self.table.grad.device))

    def _carry(
        self, sent: torch.Tensor | None, like: nn.Parameter | None, source: int, target: int
    ) -> torch.Tensor | None:
        """What ``target`` gets from ``source``; ``None`` elsewhere.

        Args:
            sent: on the source.
            like: on the target, what has the shape and the dtype of it.
        """
        if source == target:
            return sent
        if sent is not None and sent.numel():
            dist.send(sent.to(self.device).contiguous(), group=self.group, group_dst=target)
        if like is None:
            return None
        arrived = torch.empty_like(local_tensor(like), device=self.device)
        if arrived.numel():
            dist.recv(arrived, group=self.group, group_src=source)
        return arrived
