"""The global norm of the gradient, its shares along the axes of the mesh, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from forge_core.distributed.mesh import Mesh
from forge_core.ops.local_tensor import local_tensor

Layout = tuple[DeviceMesh | None, tuple[int, ...]]
"""A mesh, and the dimensions of it over which ranks hold different elements."""


@attrs.frozen
class Squares:
    """The share that gradients laid out alike add to the square of a norm."""

    indices: Sequence[int]
    """Their indices among all gradients of this rank."""
    each: torch.Tensor
    """The sum of the squares of this rank's elements of each: fp32, where the gradients are. Not finite if one of them
    is not, or if they are too large to be squared."""


class Gradients:
    """A step's gradients on this rank, and what is known of them over all ranks.

    Args:
        parameters: that are trained, by name; one without a gradient is left out.
        device: the run's, over which ranks talk; gradients may be kept elsewhere.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, device: torch.device) -> None:
        self.named = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self.squares = squared_norms([*self.named.values()])
        self.norm = global_norm(self.squares, mesh, device)
        """Same as ``global_norm``."""


def squared_norms(gradients: Sequence[torch.Tensor]) -> Mapping[Layout, Squares]:
    """The sums of squares that norms of gradients are made of, by layout."""
    indices: dict[Layout, list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        indices[_sharded_over(gradient)].append(index)
    squares = {}
    for layout, of_layout in indices.items():
        norms = torch._foreach_norm([local_tensor(gradients[index]) for index in of_layout], 2.0, dtype=torch.float32)
        squares[layout] = Squares(of_layout, torch.stack(norms).square_())
    return squares


def clip_gradients(optimizer: torch.optim.Optimizer, gradients: Gradients, max_norm: float) -> None:
    """Scale the gradients by ``min(1, max_norm / norm)``: here, in place, or in the next step of an optimizer with
    ``scales_gradients``, which is told the factor. A ``max_norm`` of 0 leaves them as they are."""
    scale = (max_norm / (gradients.norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else None
    if scale is not None and not getattr(optimizer, "scales_gradients", False):
        multiply_gradients(gradients.named.values(), scale)
        scale = None
    optimizer.gradient_scale = scale  # type: ignore[attr-defined]  # the contract of scales_gradients


def multiply_gradients(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply what this rank has of them by a scalar on any device, in place."""
    for group in _by_device_and_dtype(map(local_tensor, gradients)):
        torch._foreach_mul_(group, factor.to(group[0].device))


def global_norm(squares: Mapping[Layout, Squares], mesh: Mesh, device: torch.device) -> torch.Tensor:
    """The L2 norm of the gradients of all ranks, each element counted once; zero for no gradients.

    They are summed over every axis of the mesh that shards them, and over pipeline stages.

    Args:
        squares: of this rank's gradients, as ``squared_norms`` returns them.
        device: the run's, over which ranks talk; gradients may be kept elsewhere.

    Returns:
        An fp32 scalar on ``device``, equal on all ranks. The host does not wait for it, unless gradients are in
        its memory.
    """
    total = torch.zeros((), device=device)
    for (device_mesh, sharded), of_layout in squares.items():
        summed = of_layout.each.sum().to(device)
        for dim in sharded:
            if device_mesh is not None and device_mesh.size(dim) > 1:
                dist.all_reduce(summed, group=device_mesh.get_group(dim))
        total = total + summed
    return mesh.sum_over(total, ("pp",)).sqrt_()


def norms_along(
    squares: Mapping[Layout, Squares], mesh: Mesh, axes: Sequence[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """The global norm, shared out among the coordinates of each axis: ``pp0``, ``pp1``, …

    ``pp0`` is the L2 norm of what the ranks with the coordinate 0 on the axis ``pp`` hold. An element of which ``k``
    ranks of the world have a copy counts 1/k of its square on each, so that along every axis the squares of the norms
    add up to the square of ``global_norm``: a sharded element counts where it is, and a replicated one the same
    everywhere.

    Args:
        squares: of this rank's gradients, as ``squared_norms`` returns them.
        axes: of the mesh.
        device: the run's.

    Returns:
        fp32 scalars on ``device``, equal on all ranks. They cost one collective over all ranks, and the host no more
        waiting than ``global_norm``.
    """
    ranks_of_stage = mesh.world_size // mesh.degrees["pp"]
    held = torch.zeros((), device=device)
    for (device_mesh, sharded), of_layout in squares.items():
        parts = 1 if device_mesh is None else prod(device_mesh.size(dim) for dim in sharded)
        held = held + of_layout.each.sum().to(device) * (parts / ranks_of_stage)
    names = [f"{axis}{coordinate}" for axis in axes for coordinate in range(mesh.degrees[axis])]
    own = {f"{axis}{mesh.device_mesh.get_local_rank(axis)}" for axis in axes}
    shares = torch.stack([held if name in own else torch.zeros_like(held) for name in names])
    dist.all_reduce(shares)
    return dict(zip(names, shares.sqrt_().unbind(), strict=True))


def all_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return whether this rank's elements of all of them are finite: a boolean scalar on ``device``."""
    held = [local for local in map(local_tensor, tensors) if local.is_floating_point() and local.numel() > 0]
    largest = [torch.stack(torch._foreach_norm(group, torch.inf)).to(device) for group in _by_device_and_dtype(held)]
    return torch.cat([torch.zeros(1, device=device), *largest]).isfinite().all()


def _sharded_over(gradient: torch.Tensor) -> Layout:
    if not isinstance(gradient, DTensor):
        return None, ()
    assert not any(isinstance(placement, Partial) for placement in gradient.placements), "gradient not yet reduced"
    return gradient.device_mesh, tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())


def _by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()
