"""How a value lies over ranks: made whole to be read, and cut again after a change.

A value that is cut along a dimension by several mesh axes is cut by the outer axis first, in the order of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from forge_core.distributed.mesh import Mesh

Order = Literal["contiguous", "balanced", "tokens"]
"""As in ``Part``."""

# torch 2.13 calls it by a new name and warns of the old one, which is all that 2.11 has
_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@attrs.frozen(eq=False)
class Cut:
    """One dimension of a value, of which each rank of a group has a part of equal length."""

    axis: str
    dim: int
    order: Order
    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: Mesh, axis: str, dim: int, order: Order) -> Cut:
        """The cut of dimension ``dim`` over a mesh axis; ``order`` as in ``Part``."""
        one = mesh.device_mesh
        return cls(axis, dim, order, one.get_group(axis), mesh.degrees[axis], one.get_local_rank(axis))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks as one, in order. All ranks of the group call it together."""
        gathered = part.new_empty((self.size, *part.shape))
        _gather_tensor(gathered.flatten(0, 1) if part.ndim else gathered, part.contiguous(), group=self.group)
        if self.order == "tokens":  # samples are in the dimension before
            tokens = gathered.movedim(0, self.dim - 1).flatten(self.dim - 1, self.dim + 1)
            return torch.unflatten(tokens, self.dim - 1, (part.shape[self.dim - 1], -1))
        parts = gathered.unbind(0)
        if self.order == "contiguous":
            return torch.cat(parts, self.dim)
        heads, tails = zip(*(one.chunk(2, self.dim) for one in parts), strict=True)
        return torch.cat((*heads, *reversed(tails)), self.dim)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        if self.order == "contiguous":
            return whole.chunk(self.size, self.dim)[self.rank]
        if self.order == "tokens":
            own = whole.flatten(self.dim - 1, self.dim).chunk(self.size, self.dim - 1)[self.rank]
            return torch.unflatten(own, self.dim - 1, (whole.shape[self.dim - 1], -1))
        chunks = whole.chunk(2 * self.size, self.dim)
        return torch.cat((chunks[self.rank], chunks[2 * self.size - 1 - self.rank]), self.dim)


def whole_shape(part: torch.Tensor, cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape of the value, from this rank's part of it."""
    sizes = list(part.shape)
    for cut in cuts:
        sizes[cut.dim] *= cut.size
    return tuple(sizes)


@torch.no_grad()
def whole(part: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """The value, detached, from this rank's part of it.

    Args:
        cuts: from the outermost to the innermost.
    """
    for cut in reversed(cuts):
        part = cut.whole(part)
    return part.detach()


def with_gradient(part: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """The value, connected to the parts of all ranks. Each rank's backward is of what it does with the value."""
    for cut in reversed(cuts):
        part = _Whole.apply(part, cut)  # type: ignore[no-untyped-call]  # torch's
    return part


def own_part(value: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """This rank's part of the value."""
    for cut in cuts:
        value = cut.part(value)
    return value


def summed(gradient: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The sum of what the ranks of each group have."""
    for group in groups:
        gradient = functional.all_reduce(gradient, "sum", group)
    return gradient


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, cut: Cut) -> torch.Tensor:
        ctx.cut = cut
        return cut.whole(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = functional.all_reduce(gradients[0].contiguous(), "sum", ctx.cut.group)
        return ctx.cut.part(total), None
